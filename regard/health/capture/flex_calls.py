"""Captures FlexAttention: the mask of a BlockMask, and what `score_mod` does to the scores, as a dense bias.

    bias = score_mod(c·q kᵀ) − c·q kᵀ        −inf where the mask hides

A compiled `flex_attention` runs as it was written while calls are captured; on a GPU its own output comes from a
compiled copy, because the plain function builds all scores.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from regard.health.capture.call import MAX_DENSE, Call
from regard.health.capture.forwards import running_module, without_mode
from regard.health.capture.fused_call import first_of
from regard.health.capture.interception import interceptions_of, is_swapped, route_result


def capture_flex(original: Callable, given: dict[str, Any]) -> Any:
    """Captures torch.nn.attention.flex_attention.flex_attention."""
    if torch.compiler.is_compiling():
        return original(**given)
    module, run = running_module(), partial(_run, original, given)
    if module is None or not interceptions_of(module):
        return run()
    q, k, v, score_mod, scale = (given[name] for name in ("query", "key", "value", "score_mod", "scale"))
    with without_mode():
        call = Call(
            module, q, k, v, own=lambda _: first_of(run()), kind="flex_attention", options=dict(scale=scale),
            sliceable=False,
        )  # fmt: skip
        entries = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        if score_mod is not None and entries > MAX_DENSE:
            call.obstacle = f"its score_mod would take {entries:,} scores; examine shorter sequences"
        else:
            with torch.set_grad_enabled(is_swapped(module) and torch.is_grad_enabled()):
                call.mask = mask_of_block(given["block_mask"], q, k)
                if score_mod is not None:
                    call.mask = _bias_of(score_mod, q, k, scale, call.mask)
        returns_more = bool(given.get("return_lse")) or given.get("return_aux") is not None
        return route_result(call, run, first_of, lambda output: output, returns_more)


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
