"""One call of a fused attention function: its arguments in common terms, batched or packed, and its way to a `Call`.

Causal order and windows of flash-attention end at the last key: query i stands at i + N − M, or at i if the order
begins `at_first_key`. ALiBi slopes become a dense bias −slope·|position − j|. Packed tensors [tokens, heads, width] are
one sequence whose documents are a `regard.Mask`, and ALiBi a bias of `regard.bias`: neither is N × N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard._call.mask.documents import document_mask
from regard._call.mask.mask import Mask
from regard.bias import Bias, alibi
from regard.health.capture.call import MAX_DENSE, Call, clean_mask, hide, merge_mask_and_bias
from regard.health.capture.forwards import running_module, without_mode
from regard.health.capture.guard import Refused
from regard.health.capture.interception import interceptions_of, route_result

Sides = tuple[int | None, int | None]


class NotMeasured(Exception):
    """Says why a call cannot be measured."""


CHECKED: list[bool] = []  # not empty while the model is given texts of ours, whose lengths it may not expect


@dataclass
class FusedCall:
    """A fused attention call: q, k, v [B, M, H, D] or, with `cu_q`, [T, H, D]."""

    kind: str
    run: Callable[[float | None], Any]  # dropout (None: its own) -> what the function returns, the output first
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    causal: bool = False
    window: Sides = (None, None)
    at_first_key: bool = False  # query i stands at key i, as in torch
    softcap: float | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None  # bool or additive, broadcasting to [B, H, M, N]
    slopes: Tensor | None = None  # of ALiBi, (H,) or (B, H)
    dropout: float = 0.0
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    obstacle: str | None = None
    returns_more: bool = False  # may it return a tuple?


def capture_fused(fused: FusedCall, module: nn.Module | None = None) -> Any:
    """Routes the call, and returns what the function would return; `module` is the running one unless given."""
    if CHECKED and fused.cu_q is not None:
        _require_documents_within(fused)
    module = running_module() if module is None else module
    if module is None or not interceptions_of(module):
        return fused.run(None)
    with without_mode():
        try:
            if fused.obstacle is not None:
                raise NotMeasured(fused.obstacle)
            layout = _arrange(fused) if fused.cu_q is None else _arrange_packed(fused)
        except NotMeasured as reason:
            call = Call(module, fused.q, fused.k, fused.v, own=lambda _: fused.q, kind=fused.kind, obstacle=str(reason))
            return route_result(call, partial(fused.run, None), first_of, first_of)
        pack = layout.pack
        call = Call(
            module, pack(fused.q), pack(fused.k), pack(fused.v), own=lambda _: pack(first_of(fused.run(0.0))),
            kind=fused.kind, mask=layout.mask, parts=layout.parts, causal=layout.causal, dropout=fused.dropout,
            sliceable=False,
            options=dict(scale=fused.scale, softcap=fused.softcap or None, sink=fused.sink, **layout.options),
        )  # fmt: skip

        def unpack(output: Tensor) -> Tensor:
            return layout.unpack(output).to(fused.q.dtype).contiguous()

        return route_result(
            call, partial(fused.run, None), lambda result: pack(first_of(result)), unpack, fused.returns_more
        )


def _require_documents_within(fused: FusedCall) -> None:
    """Refuses documents that end behind the tokens: a kernel would write there, into other tensors of the GPU."""
    for ends, x in ((fused.cu_q, fused.q), (fused.cu_k, fused.k)):
        if ends is not None and int(ends.max()) > x.shape[0]:
            raise Refused(
                f"{fused.kind} was given documents that end at token {int(ends.max())} and {x.shape[0]} tokens: the "
                "model makes its cu_seqlens for texts of another length; let it take them from the batch"
            )


def first_of(result: Any) -> Tensor:
    """Returns the output of a function that may return more."""
    return result[0] if isinstance(result, (tuple, list)) else result


@dataclass
class Layout:
    """How a fused call becomes one of `regard.attention`: tensors to [B, H, M, D] and back, its mask, its options."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    mask: Tensor | None
    causal: bool
    options: dict[str, Any]
    parts: tuple[Mask | Bias, ...] = ()  # packed documents, and their ALiBi bias


def _arrange(fused: FusedCall) -> Layout:
    queries, keys = fused.q.shape[1], fused.k.shape[1]
    options: dict[str, Any] = {}
    mask, causal = clean_mask(fused.mask), fused.causal
    if (causal or fused.window != (None, None)) and queries != keys and not fused.at_first_key:
        end_q, end_k = (torch.tensor([0, n], device=fused.q.device) for n in (queries, keys))
        order = document_mask(end_q, end_k, queries, keys, causal, fused.window).dense(queries, keys)[None, None]
        mask, causal = order if mask is None else hide(mask, ~order), False
    elif fused.window != (None, None):
        options["window"] = fused.window
    if mask is not None:
        _refuse_long(mask.numel())
    mask = _add_slopes(mask, fused, queries, keys)
    return Layout(_swap_heads, _swap_heads, mask, causal, options)


def _refuse_long(entries: int) -> None:
    if entries > MAX_DENSE:
        raise NotMeasured(f"its mask would take {entries:,} entries; examine shorter sequences")


def _add_slopes(mask: Tensor | None, fused: FusedCall, queries: int, keys: int) -> Tensor | None:
    """Adds −slope·|position of the query − j| to a mask, if there are slopes."""
    if fused.slopes is None:
        return mask
    slopes = fused.slopes.reshape(-1, fused.slopes.shape[-1], 1, 1)
    _refuse_long(max(len(slopes), 1 if mask is None else len(mask)) * slopes.shape[1] * queries * keys)
    position = torch.arange(queries, device=slopes.device) + (0 if fused.at_first_key else keys - queries)
    distance = (position[:, None] - torch.arange(keys, device=slopes.device)).abs()
    return merge_mask_and_bias(mask, -slopes * distance, False, queries, keys)[0]


def _swap_heads(x: Tensor) -> Tensor:
    """[B, M, H, D] ↔ [B, H, M, D]."""
    return x.transpose(1, 2)


def _arrange_packed(fused: FusedCall) -> Layout:
    cu_q, cu_k = fused.cu_q, fused.cu_k
    assert cu_q is not None
    if cu_k is None:
        raise NotMeasured("it is packed, but has no ends of the keys' documents")
    tokens, keys = fused.q.shape[0], fused.k.shape[0]
    has_same_documents = tokens == keys and (cu_q is cu_k or bool(cu_q.equal(cu_k)))
    own = "ALiBi slopes" if fused.slopes is not None else "an order from the first key" if fused.at_first_key else None
    if own is not None and not has_same_documents:
        raise NotMeasured(f"it is packed with {own}, and its documents have other keys than queries")
    ends = cu_q if has_same_documents else cu_k
    parts: list[Mask | Bias] = [document_mask(cu_q, ends, tokens, keys, fused.causal, fused.window)]
    if fused.slopes is not None:
        slopes = fused.slopes.reshape(-1, fused.slopes.shape[-1])
        if len(slopes) > 1 and not bool((slopes == slopes[:1]).all()):
            raise NotMeasured("it is packed, and each document has ALiBi slopes of its own")
        parts.append(alibi(slopes[0].detach()))
    return Layout(lambda x: x.transpose(0, 1)[None], lambda x: x[0].transpose(0, 1), None, False, {}, tuple(parts))
