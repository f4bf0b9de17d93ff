"""From the arguments of `regard.attention` to a `PreparedCall`: tensors brought to [B, H, M, D], options resolved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import normalizers, statistics
from regard._call.arguments import AttentionOptions
from regard._call.mask.attn_mask import split_attn_mask
from regard._call.mask.visible import (
    Visible,
    check_key_lengths,
    check_mask,
    check_order,
    check_window,
    find_ahead,
    resolve_mask,
)
from regard._call.options import (
    check_dropout,
    check_gate,
    check_scale_tensor,
    check_score_mod,
    check_sink,
    check_softcap,
    check_temperature,
    check_theta,
    divide_scale,
    split_policy,
    split_scale,
    void_outside_kernels,
)
from regard._call.problem import TENSORS, Problem
from regard._call.scores import resolve_scale
from regard._call.validation import check_flag, check_scores, is_autocast
from regard._core.dispatch import Path, choose
from regard._facts import accumulator, readable
from regard.temperature.rows import visible_keys


@dataclass(slots=True)
class PreparedCall:
    """One checked call: its problem, the tensors that gradients flow to, and what the caller gets back."""

    problem: Problem
    given: dict[str, Tensor | None]  # the problem's tensors beside q, k and v as they came, not expanded
    policy: Callable | None  # a temperature policy that has not been asked yet
    queries: Tensor  # [B, H, M, D] before any scale per head: what a policy reads
    wanted: tuple[str, ...] | None  # statistics to return; None returns the output alone
    lead: tuple[int, ...]  # leading dims of the output, (…, H)
    dtype: torch.dtype  # of the output
    path: Path
    gate: Tensor | None  # as it came, checked
    row_shift: Tensor | None  # 3-dim, not expanded: a bias per query that moves statistics alone
    shapes: tuple[torch.Size, ...]  # of q, k and v as they came; () if v was replaced

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The tensors of the problem in the order of `problem.TENSORS`, not expanded."""
        p = self.problem
        return p.q, p.k, p.v, *(self.given.get(name, getattr(p, name)) for name in TENSORS[3:])

    @property
    def is_as_given(self) -> bool:
        """True if q, k and v of the problem are those of the caller."""
        p = self.problem
        return self.shapes == (p.q.shape, p.k.shape, p.v.shape) and p.q.dtype == self.dtype


def prepare(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PreparedCall:
    """Check every argument, resolve the options and choose the path of a call."""
    wanted = statistics.requested(options.return_stats)
    chosen = normalizers.get(options.normalizer).simplest
    choice = chosen.plain
    check_tensors(q, k, v)
    shapes: tuple[torch.Size, ...] = (q.shape, k.shape, v.shape)
    rank = max(q.ndim, k.ndim, v.ndim)
    q, k, v = (x[(None,) * (rank - x.ndim)] for x in (q, k, v))
    given = split_attn_mask(options.attn_mask, options.is_causal, q.device)
    (q, k, v), dense = cast_for_autocast(q, k, v), cast_for_autocast(*given.tensors, like=q)
    dtype = q.dtype
    dropout_p = check_dropout(options.dropout_p, wanted)
    if dropout_p == 1.0:  # every weight is dropped: output and gradients are 0
        v, dropout_p, shapes = v.masked_fill(torch.ones((), dtype=torch.bool, device=v.device), 0.0), 0.0, ()
    is_causal, enable_gqa = check_flag(given.is_causal, "is_causal"), check_flag(options.enable_gqa, "enable_gqa")
    by_entry = options.key_lengths is not None or given.counts_entries
    lead, batch, heads, kv_heads = broadcast_leading(q, k, v, enable_gqa, by_entry, options.sink)
    queries, keys = q.shape[-2], k.shape[-2]
    gate = check_gate(options.gate, (*lead, queries), v.shape[-1], q)
    q = q.expand(*lead, *q.shape[-2:]).reshape(batch, heads, *q.shape[-2:])
    kv_lead = lead if heads == 1 else (*lead[:-1], kv_heads)
    k, v = (x.expand(*kv_lead, *x.shape[-2:]).reshape(batch, kv_heads, *x.shape[-2:]) for x in (k, v))
    bias = mask = None
    for x in dense:
        shaped = check_mask(x, lead, batch, heads, queries, keys, q)
        if shaped.dtype == torch.bool:
            mask = shaped if mask is None else mask & shaped
        else:
            bias = shaped
    left, right = check_window(options.window)
    key_bias = row_bias = relative = row_shift = None
    measured = wanted or ()
    if given.bias is not None:
        ahead = find_ahead(given.mask, 0 if is_causal else right, queries, keys)
        check_order(given, ahead, queries, keys)
        key_bias, row_bias, relative = given.bias.terms(q, keys, ahead)
        if choice.is_shift_invariant and options.sink is None and not callable(options.temperature):
            row_bias, row_shift = None, row_bias if wanted else None  # it moves every score of a row alike
    if row_shift is not None:
        measured = statistics.resolve((*measured, "visible_keys"))  # rows that see a key are moved
    if key_bias is not None:
        bias = key_bias if bias is None else bias + key_bias
    has_bias = any(x is not None for x in (bias, row_bias, relative))
    softcap, score = check_score_mod(options.score_mod, check_softcap(options.softcap))
    is_linear = softcap is None and score is None and not has_bias
    policy, value, is_learned = split_policy(options.temperature)
    number, temperature = check_temperature(value, lead, batch, heads, queries, q, is_learned=is_learned)
    scale, unscaled = resolve_scale(options.scale, q.shape[-1]), q
    if isinstance(scale, Tensor):
        per_head, scale = check_scale_tensor(scale, heads, q), 1.0
        if q.dtype in (torch.float32, torch.float64):
            q = q * per_head
        elif is_linear and options.backend != "torch":  # q·scale would be rounded to 16 bits
            factor, own = split_scale(per_head)
            q, own = q * factor.to(q.dtype), own.reshape(1, -1, 1)
            number, temperature = 1.0, own * number if temperature is None else own * temperature
        else:
            q, k, v = q.float() * per_head, k.float(), v.float()
    if number != 1.0:
        if is_linear:
            scale = divide_scale(scale, number)
        else:
            temperature = q.new_full((1, 1, 1), number, dtype=accumulator(q.dtype))
    sink = check_sink(options.sink, choice, heads, lead, batch, queries, q)
    key_lengths, interval = check_key_lengths(options.key_lengths, batch, keys, q), None
    if given.mask is not None:
        counts_distance = "distance" in (wanted or ()) or policy is not None or score is not None
        beside = Visible(is_causal, lengths=() if key_lengths is None else (key_lengths,)).with_window(
            left, right, keys
        )
        visible, key_lengths = resolve_mask(given.mask, beside, q, queries, keys, counts_distance)
        is_causal, left, right, interval = visible.causal, visible.left, visible.right, visible.interval
    score_params = None if score is None else score.stack_params(heads, q, accumulator(q.dtype))
    tensors = dict(
        bias=bias, mask=mask, temperature=temperature, sink=sink, interval=interval, row_bias=row_bias,
        relative=relative, score_params=score_params,
    )  # fmt: skip
    template = Problem(
        q, k, v, choice, scale, softcap, causal=is_causal, left=left, right=right, dropout_p=dropout_p, stats=measured,
        score=score,
    )  # fmt: skip
    every = tensors | dict(q=q, k=k, v=v, key_lengths=key_lengths)
    problem = template.with_tensors([every.get(name) for name in TENSORS])
    theta = None
    if chosen is not choice:
        theta = check_theta(chosen, lead, batch, heads, queries, q, lambda: visible_keys(problem))
        problem.theta = theta.expand(problem.q.shape[:3])
    path = choose(problem, policy, options.backend)
    if theta is not None and path.backend != "reference" and not readable(theta):
        theta = void_outside_kernels(theta, choice)
        problem.theta = theta.expand(problem.q.shape[:3])
    tensors["theta"] = theta
    return PreparedCall(problem, tensors, policy, unscaled, wanted, lead, dtype, path, gate, row_shift, shapes)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are float tensors of one device and dtype whose sizes fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_scores(x, name)
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dims (…, length, head_dim), got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got {q.device} for q and {x.device} for {name}")
        if x.dtype != q.dtype and not (is_autocast(q) and torch.float64 not in (x.dtype, q.dtype)):  # which it leaves
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype} for q and {x.dtype} for {name}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same length, got {k.shape[-2]} and {v.shape[-2]}")


def cast_for_autocast(*tensors: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype where it is on for `like`, as torch's sdpa does; float64 and bool stay."""
    like = like if like is not None else tensors[0]
    if not is_autocast(like):
        return tensors
    dtype = torch.get_autocast_dtype(like.device.type)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return tuple(map(cast, tensors))


def broadcast_leading(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, by_entry: bool, sink):
    """Broadcast the leading dims of q, k and v: ((…, H), B, H, G), the heads last; `by_entry`: lengths are given."""
    if q.ndim == 2:
        return (), 1, 1, 1
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != kv_heads:
        if enable_gqa or 1 not in (kv_heads, v.shape[-3]):
            raise ValueError(f"k and v must have the same number of heads, got {kv_heads} and {v.shape[-3]}")
        kv_heads = kv_heads * v.shape[-3]
    if enable_gqa:
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"the heads of q ({heads}) must be a multiple of those of k and v ({kv_heads})")
    elif heads != kv_heads and 1 not in (heads, kv_heads):
        hint = "; pass enable_gqa=True for grouped queries" if kv_heads and heads % kv_heads == 0 else ""
        if q.shape[-2] == k.shape[-2]:
            hint += "; they are (…, heads, tokens, width) here: transpose(-3, -2) if tokens come before heads"
        raise ValueError(f"q has {heads} heads and k has {kv_heads}: they do not fit{hint}")
    if not enable_gqa:
        heads = max(heads, kv_heads) if 0 not in (heads, kv_heads) else 0
        kv_heads = heads
    try:
        outer = q.shape[:-3]
        if not outer == k.shape[:-3] == v.shape[:-3]:  # torch imports sympy to compare them
            outer = torch.broadcast_shapes(outer, k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ValueError(
            f"the leading dims of q, k and v must broadcast, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        ) from None
    lead = (*outer, heads)
    if q.ndim == 3 and by_entry and sink is None and not enable_gqa:
        return lead, heads, 1, 1  # (N, L, D): torch's N is a batch, which key_lengths counts
    return lead, math.prod(outer), heads, kv_heads
