"""scale²·E‖q‖²·E‖k − k̄‖²/d per head: the variance of the logits if no query knew of any key's direction."""

from __future__ import annotations

from torch import Tensor

from regard.health.call import Call
from regard.scores import resolve_scale

SAMPLED = 1024  # rows and keys whose norms are taken, at least


def predicted_variance(call: Call, rows: Tensor | None) -> Tensor:
    """[H], over the rows [B, M] that count and, in self-attention, their keys."""
    scale = resolve_scale(call.options.get("scale"), call.q.shape[-1])
    every_q, every_k = (max(1, x.shape[2] // SAMPLED) for x in (call.q, call.k))
    q, k = call.q.detach(), call.k.detach()
    of_keys = rows is not None and rows.shape[1] == k.shape[2]
    if q.is_cuda:
        from regard.health import fused_call

        return scale**2 * fused_call.norms(q, k, rows, (every_q, every_k), of_keys)
    q, k = q[:, :, ::every_q].float(), k[:, :, ::every_k].float()
    norm = q.square().sum(-1)  # [B, H, M]
    if rows is None:
        q_norm = norm.mean((0, 2))
    else:
        counted = rows[:, ::every_q]
        q_norm = norm.masked_fill(~counted[:, None], 0.0).sum((0, 2)) / counted.sum().clamp_min(1)
    if rows is not None and of_keys:
        weight = rows[:, None, ::every_k, None].float()
        count = weight.sum(2, keepdim=True).clamp_min(1)
        k = k - (k * weight).sum(2, keepdim=True) / count
        k_norm = ((k * weight).square().sum((2, 3)) / count[..., 0, 0]).mean(0)
    else:
        k_norm = (k - k.mean(2, keepdim=True)).square().sum(-1).mean((0, 2))
    k_norm = k_norm.repeat_interleave(q_norm.shape[0] // k_norm.shape[0])
    return scale**2 * q_norm * k_norm / q.shape[-1]
