"""Captures FlexAttention: the mask of a BlockMask, and what `score_mod` does to the scores, as a dense bias.

    bias = score_mod(c·q kᵀ) − c·q kᵀ        −inf where the mask hides

A compiled `flex_attention` runs as it was written while calls are captured; on a GPU its own output comes from a
compiled copy, because the plain function builds all scores.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.capture.fused_call import MAX_DENSE
from regard.health.capture.interception import interceptions_of, route, route_to_observers, running_module, without_mode


def capture_flex(original: Callable, given: dict[str, Any]) -> Any:
    """Captures torch.nn.attention.flex_attention.flex_attention."""
    module = running_module()
    active = interceptions_of(module)
    if torch.compiler.is_compiling():
        return original(**given)
    if module is None or not active:
        return _run(original, given)
    swapped = any(one.swap is not None for one in active)
    results: list[Any] = []

    def run_original() -> Tensor:
        results.append(_run(original, given))
        return results[0][0] if isinstance(results[0], tuple) else results[0]

    def own(rows: Tensor | None) -> Tensor:
        output = run_original()
        return output if rows is None else output.index_select(2, rows)

    q, k, v = given["query"], given["key"], given["value"]
    with without_mode():
        entries = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        changes_scores = given.get("score_mod") is not None
        reason = None
        if changes_scores and entries > MAX_DENSE:
            reason = f"its score_mod would take {entries:,} scores; examine shorter sequences"
        call = Call(
            module, q, k, v, own=own, kind="flex_attention", options=dict(scale=given.get("scale")),
            sliceable=False, obstacle=reason,
        )  # fmt: skip
        if reason is not None:
            (route if swapped else route_to_observers)(call, run_original)
            return results[0]
        with torch.set_grad_enabled(swapped and torch.is_grad_enabled()):
            call.mask = mask_of_block(given.get("block_mask"), q, k)
            if changes_scores:
                call.mask = _bias_of(given["score_mod"], q, k, given.get("scale"), call.mask)
        output = route(call, run_original)
        if results and not swapped:
            return results[0]
        if given.get("return_lse") or given.get("return_aux") is not None:
            return output, *_run(original, given)[1:]
        return output


def _run(original: Callable, given: dict[str, Any]) -> Any:
    """Runs flex_attention: compiled on a GPU, else as it was written, without its advice to compile it."""
    if given["query"].is_cuda:
        with torch.compiler.set_stance("default"):
            return _compiled(original)(**given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return original(**given)


@cache
def _compiled(original: Callable) -> Callable:
    return torch.compile(original)


def mask_of_block(block_mask: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns a BlockMask as a dense bool mask [B or 1, H or 1, M, N]; None if it hides nothing."""
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    if block_mask is None or block_mask.mask_mod is noop_mask:
        return None
    batch, heads = block_mask.shape[:2]
    return create_mask(block_mask.mask_mod, batch, heads, q.shape[2], k.shape[2], device=q.device)


def _bias_of(score_mod: Callable, q: Tensor, k: Tensor, scale: float | None, mask: Tensor | None) -> Tensor | None:
    """Returns what `score_mod` adds to the scores, −inf for what is hidden; the mask alone where that is nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * (q.to(wide) @ keys.transpose(-1, -2))
    bias = _modified(score_mod, scores) - scores
    if not bias.requires_grad and not bool(bias.any()):
        return mask
    return bias if mask is None else bias.masked_fill(~mask, -math.inf)


def _modified(score_mod: Callable, scores: Tensor) -> Tensor:
    """Returns score_mod(scores, b, h, i, j) for all of [B, H, M, N]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    places = [torch.arange(size, device=scores.device) for size in scores.shape]
    mod = score_mod
    for dim in reversed(range(4)):
        mod = torch.vmap(mod, in_dims=(0, *(0 if at == dim else None for at in range(4))))
    with TransformGetItemToIndex():
        return mod(scores, *places)
