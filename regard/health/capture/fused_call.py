"""One call of a fused attention function: its arguments in common terms, batched or packed, and its way to a `Call`.

Causal order and windows of flash-attention end at the last key: query i stands at i + N − M. Packed tensors
[tokens, heads, width] of self-attention are padded to one batch entry per document, with `key_lengths`; other packed
calls take a dense mask over all tokens. Both are made here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import Call, clean_mask, merge_mask_and_bias
from regard.health.capture.documents import document_mask
from regard.health.capture.interception import interceptions_of, route, route_to_observers, running_module, without_mode

MAX_DENSE = 2**30  # entries of a dense mask or bias
MAX_PADDING = 4  # padded documents may take so many times the tokens, where a dense mask could be made
Sides = tuple[int | None, int | None]


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
    at_first_key: bool = False  # causal order begins at the first key, as torch's, not at the last
    softcap: float | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None  # bool or additive, broadcasting to [B, H, M, N]
    slopes: Tensor | None = None  # of ALiBi, (H,) or (B, H)
    dropout: float = 0.0
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_k: Tensor | None = None
    obstacle: str | None = None
    returns_more: bool = False  # may it return a tuple?
    flat_heads: bool = False  # is its output [..., H·E]?


def capture(fused: FusedCall, module: nn.Module | None = None) -> Any:
    """Routes the call, and returns what the function would return; `module` is the running one unless given."""
    module = running_module() if module is None else module
    active = interceptions_of(module)
    if module is None or not active:
        return fused.run(None)
    with without_mode():
        return _capture(module, fused, any(one.swap is not None for one in active))


def _capture(module: nn.Module, fused: FusedCall, swapped: bool) -> Any:
    results: list[Any] = []
    pack, unpack, options, mask, causal, reason = _arrange(fused)

    def run_original() -> Tensor:
        results.append(fused.run(None))
        return pack(_split_heads(_first(results[0]), fused))

    def own(rows: Tensor | None) -> Tensor:
        output = pack(_split_heads(_first(fused.run(0.0)), fused))
        return output if rows is None else output.index_select(2, rows)

    if reason is not None:
        call = Call(module, fused.q, fused.k, fused.v, own=lambda rows: fused.q, kind=fused.kind, obstacle=reason)

        def run_only() -> Tensor:
            results.append(fused.run(None))
            return _first(results[0])

        (route if swapped else route_to_observers)(call, run_only)
        return results[0]
    call = Call(
        module, pack(fused.q), pack(fused.k), pack(fused.v), own=own, kind=fused.kind, mask=mask, causal=causal,
        options=dict(scale=fused.scale, softcap=fused.softcap or None, sink=fused.sink, **options),
        dropout=fused.dropout, sliceable=False,
    )  # fmt: skip
    output = route(call, run_original)
    if results and not swapped:
        return results[0]
    if fused.returns_more and not results:
        results.append(fused.run(None))
    output = unpack(output).to(fused.q.dtype).contiguous()
    output = output.flatten(-2) if fused.flat_heads else output
    return (output, *results[0][1:]) if results and isinstance(results[0], tuple) else output


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def _split_heads(output: Tensor, fused: FusedCall) -> Tensor:
    return output.unflatten(-1, (fused.q.shape[-2], -1)) if fused.flat_heads else output


def _arrange(fused: FusedCall) -> tuple[Callable, Callable, dict, Tensor | None, bool, str | None]:
    """Returns (own layout → [B, H, M, D], back, options, mask, causal, obstacle)."""
    if fused.obstacle is not None:
        return _swap_heads, _swap_heads, {}, None, False, fused.obstacle
    if fused.cu_q is not None:
        return _arrange_packed(fused)
    queries, keys = fused.q.shape[1], fused.k.shape[1]
    options: dict[str, Any] = {}
    mask, causal = clean_mask(fused.mask), fused.causal
    ordered = causal or fused.window != (None, None)
    if fused.used_k is not None and ordered:
        return _swap_heads, _swap_heads, {}, None, False, "it gives lengths of a cache, and an order that ends there"
    if fused.used_k is not None:
        options["key_lengths"] = fused.used_k
    elif ordered and queries != keys and not fused.at_first_key:
        end_q, end_k = (torch.tensor([0, n], device=fused.q.device) for n in (queries, keys))
        order = document_mask(end_q, end_k, queries, keys, causal, fused.window).dense(queries, keys)[None, None]
        mask = order if mask is None else mask & order if mask.dtype == torch.bool else _hide(mask, order)
        causal = False
    elif fused.window != (None, None):
        options["window"] = fused.window
    if fused.slopes is not None:
        mask = _add_slopes(mask, fused.slopes, queries, keys)
    if mask is not None and mask.numel() > MAX_DENSE:
        return _swap_heads, _swap_heads, {}, None, False, _too_long(mask.numel())
    return _swap_heads, _swap_heads, options, mask, causal, None


def _hide(mask: Tensor, visible: Tensor) -> Tensor:
    return mask.masked_fill(~visible, -torch.inf)


def _too_long(entries: int) -> str:
    return f"its mask would take {entries:,} entries; examine shorter sequences"


def _swap_heads(x: Tensor) -> Tensor:
    """[B, M, H, D] ↔ [B, H, M, D]."""
    return x.transpose(1, 2)


def _add_slopes(mask: Tensor | None, slopes: Tensor, queries: int, keys: int) -> Tensor:
    """Adds −slope·|i + N − M − j| to a mask."""
    place = torch.arange(queries, device=slopes.device)[:, None] + keys - queries
    distance = (place - torch.arange(keys, device=slopes.device)).abs()
    bias = -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance
    merged, _ = merge_mask_and_bias(mask, bias, False, queries, keys)
    assert merged is not None
    return merged


def _arrange_packed(fused: FusedCall) -> tuple[Callable, Callable, dict, Tensor | None, bool, str | None]:
    cu_q, cu_k = fused.cu_q, fused.cu_k
    assert cu_q is not None
    if cu_k is None:
        return _swap_heads, _swap_heads, {}, None, False, "it is packed, but has no ends of the keys' documents"
    tokens, keys, lengths = fused.q.shape[0], fused.k.shape[0], cu_q.diff()
    same = fused.used_k is None and tokens == keys and (cu_q is cu_k or bool(cu_q.equal(cu_k)))
    longest = int(lengths.max()) if len(lengths) else 0
    too_many = tokens * keys > MAX_DENSE
    if same and (len(lengths) * longest <= MAX_PADDING * tokens or too_many or fused.slopes is not None):
        pad = Padding(cu_q, longest)
        mask = None if fused.slopes is None else _add_slopes(None, fused.slopes, longest, longest)
        options: dict[str, Any] = dict(key_lengths=lengths)
        if fused.window != (None, None):
            options["window"] = fused.window
        return pad.pad, pad.unpad, options, mask, fused.causal, None
    if fused.slopes is not None or too_many:
        reason = "it is packed with ALiBi slopes over a cache" if fused.slopes is not None else _too_long(tokens * keys)
        return _swap_heads, _swap_heads, {}, None, False, reason
    visible = document_mask(cu_q, cu_k, tokens, keys, fused.causal, fused.window, fused.used_k)
    mask = visible.dense(tokens, keys)[None, None]
    return (lambda x: x.transpose(0, 1)[None]), (lambda x: x[0].transpose(0, 1)), {}, mask, False, None


class Padding:
    """Packed tokens [T, H, D] ↔ one batch entry per document, [documents, H, longest, D]."""

    def __init__(self, cu: Tensor, longest: int) -> None:
        cu = cu.long()
        place = torch.arange(longest, device=cu.device)
        self.inside = place < cu.diff()[:, None]  # [documents, longest]
        self.index = (cu[:-1, None] + place).masked_fill(~self.inside, 0)

    def pad(self, x: Tensor) -> Tensor:
        """Returns [documents, H, longest, D], 0 past the end of a document."""
        return x[self.index].masked_fill(~self.inside[..., None, None], 0).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """Returns [T, H, D]."""
        return x.transpose(1, 2)[self.inside]
