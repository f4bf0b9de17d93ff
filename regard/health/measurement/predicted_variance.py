"""scale²·E‖q/T‖²·E‖k − k̄‖²/d per head: the variance of the logits if no query knew of any key's direction."""

from __future__ import annotations

import numbers

from torch import Tensor

from regard.health.capture.call import Call
from regard.health.readings.layer_reading import LayerReading
from regard.health.readings.layout import places
from regard.scores import resolve_scale

SAMPLED = 1024  # rows and keys whose norms are taken, at least


def predict(reading: LayerReading, call: Call, rows: Tensor | None) -> None:
    """Add one call's prediction to a reading, over the rows [B, M] that count and, in self-attention, their keys."""
    scale, temperature = resolve_scale(call.options.get("scale"), call.q.shape[-1]), _temperature(call)
    if isinstance(temperature, numbers.Real):
        scale = scale / temperature
    if not call.q.is_cuda or isinstance(scale, Tensor) or isinstance(temperature, Tensor):
        reading.predict(predicted_variance(call, rows, scale), rows)
        return
    from regard.health.measurement import gpu_call

    parts = places(reading.heads)
    gpu_call.predict(
        reading.flat, parts["predicted"][0], parts["calls"][0], call.q.detach(), call.k.detach(), rows, _every(call),
        _of_keys(call, rows), scale,
    )  # fmt: skip


def _temperature(call: Call):
    """A number or a tensor where it is known before the rows are; a policy that asks of them is not counted."""
    given = call.options.get("temperature")
    return getattr(given, "value", given)


def _every(call: Call) -> tuple[int, int]:
    return max(1, call.q.shape[2] // SAMPLED), max(1, call.k.shape[2] // SAMPLED)


def _of_keys(call: Call, rows: Tensor | None) -> bool:
    return rows is not None and rows.shape[1] == call.k.shape[2]


def predicted_variance(call: Call, rows: Tensor | None, scale: float | Tensor) -> Tensor:
    """[H]"""
    every_q, every_k = _every(call)
    q, k = call.q.detach()[:, :, ::every_q].float(), call.k.detach()[:, :, ::every_k].float()
    norm = q.square().sum(-1)  # [B, H, M]
    temperature = _temperature(call)
    if isinstance(temperature, Tensor):
        per_row = temperature.detach().to(q).expand(*call.q.shape[:3], 1)
        norm = norm / per_row[:, :, ::every_q, 0].square()
    if rows is None:
        q_norm = norm.mean((0, 2))
    else:
        counted = rows[:, ::every_q]
        q_norm = norm.masked_fill(~counted[:, None], 0.0).sum((0, 2)) / counted.sum().clamp_min(1)
    if rows is not None and _of_keys(call, rows):
        weight = rows[:, None, ::every_k, None].float()
        count = weight.sum(2, keepdim=True).clamp_min(1)
        k = k - (k * weight).sum(2, keepdim=True) / count
        k_norm = ((k * weight).square().sum((2, 3)) / count[..., 0, 0]).mean(0)
    else:
        k_norm = (k - k.mean(2, keepdim=True)).square().sum(-1).mean((0, 2))
    k_norm = k_norm.repeat_interleave(q_norm.shape[0] // k_norm.shape[0])
    return scale**2 * q_norm * k_norm / q.shape[-1]
