"""dk and dv, one program per block of keys: in Gluon on Hopper where that kernel supports the call, else in Triton.

Both store ds in scratch [heads, keys, queries], if there is one; the Gluon kernel also in a band of it.
"""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from regard._backends.gpu import bundle
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.backward.two_sweeps import backward_dkv
from regard._backends.gpu.attention.config import config_of, describe_blocks, options, view
from regard._backends.gpu.attention.hopper import launch as hopper
from regard._backends.gpu.attention.hopper.biases import make_relative_bias
from regard._backends.gpu.attention.hopper.spans import Spans, find_query_ranges, find_spans
from regard._backends.gpu.attention.hopper.spans import needs_spans as forward_needs_spans
from regard._backends.gpu.attention.limits import find_gluon_obstacle, find_layout_obstacle, find_option
from regard._backends.gpu.attention.masks.dense import PackedMask, add_tile_map
from regard._backends.gpu.attention.masks.tables import add_key_index, add_query_ranges
from regard._backends.gpu.launcher import launch, launch_key
from regard._call.problem import MARKS, Problem

SHORT = 512  # queries or keys
PARTS, STAGES, REGISTERS = 2, 4, 240  # of the Gluon kernel: warpgroups, stages of its ring, registers of their threads
BAND = PARTS * hopper.ROWS  # keys of one of its programs, which have a band of ds in common
# columns of a band beside the window's: the keys of a program, and a query tile that ends later
ROOM = BAND + hopper.ROWS


def run(
    p: Problem, do: torch.Tensor, rows: State, scratch, dk: torch.Tensor, dv: torch.Tensor, failed, flags,
    d_key_bias: torch.Tensor | None = None, spans: Spans | None = None, packed: PackedMask | None = None,
) -> None:  # fmt: skip
    """Fill dk, dv, `scratch` and `d_key_bias` [B, H, N]; `failed` flags the key blocks that are wanted, None: all."""
    known = (x for x in rows if x is not None)
    key, opt = launch_key(p, do, dk, dv, *known), options(p)
    if failed is None and supports_hopper(p, do, rows, dk, dv) is None:
        _run_hopper(p, do, rows, scratch, dk, dv, opt, key, flags, d_key_bias, spans)
        return
    assert scratch is None or find_band(p) is None, "only the Gluon kernel stores a band of ds"
    config, how = config_of(p, "backward_dkv", **flags)
    opt = add_query_ranges(p, config, add_tile_map(p, config, add_key_index(p, opt), True, packed))
    queries = (describe_blocks(x, config.BM, w, config.BULK) for x, w in ((p.q, config.BD), (do, config.BE)))
    ds_blocks = None
    if scratch is not None:
        ds_blocks = TensorDescriptor(scratch, list(scratch.shape), list(scratch.stride()), [1, config.BN, config.BM])
    outputs = ds_blocks, view(dk), view(dv), d_key_bias
    arguments = view(p.q), view(p.k), view(p.v), view(do), *queries, *outputs, rows, failed, opt
    blocks = triton.cdiv(p.k.shape[-2], config.BN) * p.k.shape[0] * p.k.shape[1]
    launch(key, backward_dkv, blocks, arguments, (config,), **how)


def supports_hopper(p: Problem, do: torch.Tensor, rows: State, dk: torch.Tensor, dv: torch.Tensor) -> str | None:
    """Say why the Gluon kernel cannot give dk and dv, or None."""
    if reason := find_gluon_obstacle(p):
        return reason
    if not p.q.shape[-1] == p.v.shape[-1] == 128:
        return f"head widths {p.q.shape[-1]} and {p.v.shape[-1]} (128 only)"
    if p.scale <= 0:
        return "a scale that is not positive"
    if reason := find_option(p, "score", "mask", "temperature", "row_bias") or _find_score_obstacle(p):
        return reason
    if p.theta is not None and p.theta.shape[2] > 1 and p.theta.stride(2) != 0:
        return MARKS["theta"].words
    if rows.beta is not None:
        return "gradients of statistics"
    if min(p.q.shape[-2], p.k.shape[-2]) < SHORT:
        return f"fewer than {SHORT} queries or keys"
    if p.q.shape[-2] % 4:
        return "a number of queries that is no multiple of 4"  # a head's row state begins at 16 bytes
    return find_layout_obstacle(p.q, p.k, p.v, do, dk, dv)


def _find_score_obstacle(p: Problem) -> str | None:
    """Say which cap, mask or bias of the scores the Gluon kernel cannot take."""
    biases = [x for x in (p.bias, p.relative) if x is not None]
    if p.softcap is not None and (biases or p.softcap > hopper.LARGEST_CAP):
        return "a soft cap and a bias" if biases else "a soft cap"
    if len(biases) > 1 or (p.bias is not None and p.bias.stride(2) != 0):
        return "a bias"
    simple = p.choice.family == "ratio" and p.choice.exponential
    if not simple and (p.softcap is not None or biases or needs_spans(p)):
        return f"a mask, bias or soft cap of {p.choice.spec} (softmax and softmax1 only)"
    return None


def needs_spans(p: Problem) -> bool:
    """True if the Gluon kernel takes a call's visible keys from `spans`.

    So it does with a bias per key where a tile has queries beyond the last, whose weights exp(bias) may be infinite.
    """
    has_large_weights = p.bias is not None and p.q.shape[-2] % hopper.ROWS != 0
    return has_large_weights or p.key_lengths is not None or p.reach[0] is not None or forward_needs_spans(p)


def find_band(p: Problem) -> int | None:
    """Return the column of query j in the rows of keys j … j + BAND − 1, j a multiple of `BAND`; None: no band.

    Of a window, also one that holds documents or chunks, scratch has columns only for the queries that may see one of
    these keys, j − right … j + BAND − 1 + left. Query i has column i − j + band in their rows.
    """
    left, right = p.reach
    if left is None or right is None or min(left, right) < 0 or p.relative is not None:
        return None
    band = triton.cdiv(right, BAND) * BAND
    return band if band + left + ROOM < p.q.shape[-2] else None


def _run_hopper(p: Problem, do, rows: State, scratch, dk, dv, opt, key, flags, d_key_bias, spans: Spans | None) -> None:
    from regard._backends.gpu.attention.hopper.backward.kernel import backward_hopper
    from regard._backends.gpu.attention.hopper.backward.ring import KEYS, BackwardConfig

    behind, many = p.reach[1] is not None, p.q.shape[0] * p.q.shape[1]
    inverse = rows.inverse if p.choice.family == "ratio" else None  # no other map asks
    numbers = [
        x if x is None else hopper.make_descriptor(x.reshape(many, -1), (1, KEYS.value))
        for x in (rows.shift, rows.delta, inverse)
    ]
    C = BackwardConfig(
        F=bundle.of(p.choice),
        FOLDED=flags["Z_IN_SHIFT"],
        CAUSAL=behind and not needs_spans(p),
        INTERVAL=needs_spans(p),
        RELATIVE=p.relative is not None,
        D=p.q.shape[-1],
        NUMBERS=2 if inverse is None else 3,
        WARPGROUPS=PARTS,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
    )
    k, v, m = p.k, p.v, p.q.shape[-2]
    if C.CAUSAL and k.shape[-2] > m:  # what no query sees may hold NaN: it is not read
        k, v = k[:, :, :m], v[:, :, :m]
    blocked = [hopper.describe_rows(x, KEYS.value) for x in (k, v, p.q, do)]
    ds_blocks = band = None
    if scratch is not None:
        ds_blocks, band = hopper.make_descriptor(scratch, (1, KEYS.value, KEYS.value)), find_band(p)
    outputs = hopper.describe_rows(dk, KEYS.value), hopper.describe_rows(dv, KEYS.value)
    programs = triton.cdiv(p.k.shape[-2], PARTS * KEYS.value) * p.k.shape[0] * p.k.shape[1]
    ranges = None
    if C.INTERVAL:
        spans = find_spans(p, opt) if spans is None else spans
        ranges = find_query_ranges(p, spans, PARTS * KEYS.value)
    relative = None if p.relative is None else make_relative_bias(p, opt)
    opt = opt._replace(bias=view(p.bias))
    arguments = *blocked, *numbers, ds_blocks, band, *outputs, spans, ranges, d_key_bias, relative, opt
    launch(key, backward_hopper, programs, arguments, (C,), num_warps=4)
