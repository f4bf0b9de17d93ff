"""`attention_varlen`: attention on packed sequences, [tokens, heads, width], each document by itself."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from regard._call.arguments import Keywords, Scale, Wanted
from regard._call.mask.documents import pack_documents
from regard._call.mask.parts import check_side
from regard._call.validation import fits
from regard._core.attention import attention
from regard.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

Ints = Tensor | Sequence[int]


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Ints, *flash: Any, return_stats: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Ints, *flash: Any, return_stats: Literal[True] | str | Sequence[str],
    **options: Any,
) -> tuple[Tensor, Statistics]: ...  # fmt: skip


def attention_varlen(  # type: ignore[misc]
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
    *,
    scale: Scale = None,
    return_stats: Wanted = False,
    **options: Unpack[Keywords],
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
        dropout_p, return_stats, and the other options: as in `regard.attention`.

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
    gate = options.get("gate")
    for name in ("window", "key_lengths"):
        if name in options:
            raise TypeError(f"attention_varlen() has no argument {name!r}; documents have window_size and cu_seqlens")
    _check_gate(gate, (*q.shape[:2], v.shape[2]))
    ends = (cu_seqlens_q,) if cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    promised = max_seqlen_k if type(max_seqlen_k) is int else None
    names, order = ("cu_seqlens_q", "cu_seqlens_k"), (causal, _check_window_size(window_size), promised)
    mask = pack_documents(ends, names, len(q), len(k), q.device, *order)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    given: dict[str, Any] = {name: x for name, x in options.items() if name != "gate"}
    if isinstance(given.get("softcap"), numbers.Real) and given["softcap"] == 0:
        given["softcap"] = None
    found: Any = attention(
        q, k, v, mask, dropout_p, False, softmax_scale if scale is None else scale, True, return_stats=return_stats,
        gate=gate.transpose(0, 1)[None] if isinstance(gate, Tensor) else gate, **given,
    )  # fmt: skip
    if not isinstance(found, tuple):
        return found[0].transpose(0, 1)
    out, stats = found
    return out[0].transpose(0, 1), Statistics({name: x[0] for name, x in stats.items()})


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
