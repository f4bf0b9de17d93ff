"""`attention_varlen`: attention on packed sequences, [tokens, heads, width], each document by itself."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from regard._core.attention import attention
from regard._core.mask.parts import Packed, check_cu_seqlens, check_side, find_longest
from regard._core.ops.backends import is_plain_eager
from regard._core.options import Temperature, Wanted
from regard._core.readable import readable
from regard._core.rows.validation import fits
from regard.mask import Mask
from regard.normalizers import Choice
from regard.score_function import ScoreFunction
from regard.statistics import Statistics

Ints = Tensor | Sequence[int]


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Ints, cu_seqlens_k: Ints | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    *, scale: float | str | Tensor | None = ..., normalizer: str | Choice = ..., temperature: Temperature = ...,
    score_mod: ScoreFunction | None = ..., sink: float | Tensor | None = ..., gate: Tensor | None = ...,
    return_stats: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Ints, cu_seqlens_k: Ints | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    *, scale: float | str | Tensor | None = ..., normalizer: str | Choice = ..., temperature: Temperature = ...,
    score_mod: ScoreFunction | None = ..., sink: float | Tensor | None = ..., gate: Tensor | None = ...,
    return_stats: Literal[True] | str | Sequence[str],
    backend: str | None = ...,
) -> tuple[Tensor, Statistics]: ...  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Ints,
    cu_seqlens_k: Ints | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    scale: float | str | Tensor | None = None,
    normalizer: str | Choice = "softmax",
    temperature: Temperature = None,
    score_mod: ScoreFunction | None = None,
    sink: float | Tensor | None = None,
    gate: Tensor | None = None,
    return_stats: Wanted = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Statistics]:
    """Attention within each document of packed sequences: flash-attention's varlen signature, then ours.

    >>> import regard, torch
    >>> q = k = v = torch.randn(5, 2, 8)  # documents of 2 and 3 tokens
    >>> out, stats = regard.attention_varlen(q, k, v, [0, 2, 5], causal=True, return_stats=True)
    >>> out.shape, stats.visible_keys[0]
    (torch.Size([5, 2, 8]), tensor([1., 2., 1., 2., 3.]))

    Args:
        q, k, v: (Tq, Hq, D), (Tk, Hk, D), (Tk, Hk, Dv); Hk divides Hq.
        cu_seqlens_q: (documents + 1,) ints 0, …, Tq: where the queries of each document begin and end. A document may
            have length 0.
        cu_seqlens_k: the same of the keys, 0, …, Tk; None: as the queries. On a GPU change both by torch's own in-place
            operations or make new ones: what they mean is kept from layer to layer.
        max_seqlen_q, max_seqlen_k: the longest document, as flash-attention takes it; not needed. On a GPU, if
            `cu_seqlens_k` is `cu_seqlens_q`, backward is faster with max_seqlen_k. Too small a number is an error.
        softmax_scale, scale: the factor of q·k, None for 1/√D; `scale` also takes the words and tensors of `attention`.
        causal: query i of a document of m queries and n keys sees its keys ≤ i + n − m, aligned at the bottom right.
        window_size: (left, right) keys around i + n − m that are visible; −1 for no limit.
        softcap: c in c·tanh(x/c); 0 for none.
        gate: logits of an output gate, (Tq, Hq) one per head or (Tq, Hq, Dv) one per element.
        dropout_p, normalizer, temperature, score_mod, sink, return_stats, backend: as in `regard.attention`.

    Returns:
        The output (Tq, Hq, Dv), or the pair (output, statistics) if `return_stats` is not False; each statistic is
            (Hq, Tq), and `distance` counts within the document.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes do not fit, cu_seqlens fall or do not end at the tokens, or an option is out of its range.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor (tokens, heads, width), got {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(f"{name} must have shape (tokens, heads, width), got {tuple(x.shape)}")
    if scale is not None and softmax_scale is not None:
        raise ValueError("scale and softmax_scale are two names of one argument; pass one")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if cu_seqlens_k is None and len(k) != len(q):
        raise ValueError(f"cu_seqlens_k must be given where k has other tokens ({len(k)}) than q ({len(q)})")
    _check_gate(gate, (*q.shape[:2], v.shape[2]))
    ends = (cu_seqlens_q,) if cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    promised = max_seqlen_k if type(max_seqlen_k) is int else None
    options = len(q), len(k), q.device, causal, *_check_window_size(window_size), promised
    mask = recall(ends, options, lambda: _make_mask(ends[0], ends[-1], *options))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    found: Any = attention(  # type: ignore[misc]
        q,
        k,
        v,
        mask,
        dropout_p,
        scale=softmax_scale if scale is None else scale,
        enable_gqa=True,
        normalizer=normalizer,
        temperature=temperature,
        softcap=None if isinstance(softcap, numbers.Real) and softcap == 0 else softcap,
        score_mod=score_mod,
        sink=sink,
        gate=gate.transpose(0, 1)[None] if isinstance(gate, Tensor) else gate,
        return_stats=return_stats,  # type: ignore[arg-type]
        backend=backend,
    )
    if not isinstance(found, tuple):
        return found[0].transpose(0, 1)
    out, stats = found
    return out[0].transpose(0, 1), Statistics({name: x[0] for name, x in stats.items()})


def _make_mask(
    ends_q: Ints, ends_k: Ints, queries: int, keys: int, device: torch.device, causal: bool,
    left: int | None, right: int | None, promised: int | None,
) -> Mask:  # fmt: skip
    """Check where documents begin and end, and return their mask; `promised`: no document has more keys."""
    cu_q = check_cu_seqlens(ends_q, "cu_seqlens_q", queries)
    cu_k = check_cu_seqlens(ends_k, "cu_seqlens_q" if ends_k is ends_q else "cu_seqlens_k", keys)
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have as many documents, got {len(cu_q) - 1} and {len(cu_k) - 1}"
        )
    where_q = cu_q.to(device)
    where_k = where_q if ends_k is ends_q else cu_k.to(device)
    longest = find_longest(cu_k, promised) if ends_k is ends_q else None
    return Mask((Packed.of(where_q, where_k, queries, causal, left, right, longest),))


def _check_gate(gate: Tensor | None, shape: tuple[int, int, int]) -> None:
    """Raise unless the gate's shape is (tokens, heads) or (tokens, heads, width); `attention` checks the rest."""
    if isinstance(gate, Tensor) and not (gate.ndim in (2, 3) and fits(gate.shape, shape[: gate.ndim])):
        raise ValueError(
            f"gate must have shape {shape[:2]}, one logit per head, or {shape}, one per element, got shape "
            f"{tuple(gate.shape)}"
        )


def _check_window_size(window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """Return (left, right), None for −1."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(
        isinstance(x, numbers.Integral) and not isinstance(x, bool) and x >= -1 for x in window_size
    ):
        raise ValueError(f"window_size must be (left, right), ints ≥ 0 or −1 for no limit, got {window_size!r}")
    left, right = (check_side(None if side == -1 else side, "window_size") for side in window_size)
    return left, right


MOST = 4
_recent: dict[Hashable, tuple[list[weakref.ref], Mask]] = {}  # the layers of a model pass the same cu_seqlens in turn


def recall(given: tuple[object, ...], options: tuple, make: Callable[[], Mask]) -> Mask:
    """Return make(), or what it returned lately for the same options and tensors.

    Tensors on the CPU are the same if their values are. Those on a GPU, whose values would take a wait, are if the
    object is and torch has seen no change in place; what writes to its memory past torch (`.data`, DLPack) is not
    noticed. Not while something records calls: the work of `make` belongs to the record then.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    on_gpu = [x for x in tensors if x.is_cuda]
    if len(tensors) < len(given) or not is_plain_eager() or any(x.is_inference() for x in on_gpu):
        return make()
    if not all(x.is_cuda or readable(x) for x in tensors) or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return make()
    key = options, *((id(x), x._version) if x.is_cuda else (x.dtype, str(x.tolist())) for x in tensors)
    found = _recent.get(key)
    if found is not None and all(known() is x for known, x in zip(found[0], on_gpu, strict=True)):
        return found[1]
    mask = make()
    for old in list(_recent)[: max(0, len(_recent) + 1 - MOST)]:
        _recent.pop(old, None)  # another thread may have been faster
    _recent[key] = [weakref.ref(x) for x in on_gpu], mask
    return mask
