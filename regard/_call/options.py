"""The checks of `AttentionOptions`: each raises an error that names it, or returns what a `Problem` keeps."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._call.score_function import ScoreFunction
from regard._call.scores import is_finite, is_real
from regard._call.validation import check_dense, fits, is_float
from regard._call.validation import check_theta as check_parameter
from regard._facts import accumulator, readable
from regard.normalizers import Choice

LARGEST = 1e20  # of a temperature, a soft cap and their inverses: logits then stay within float32


def _check_float(x: Any, name: str, what: str) -> None:
    """Raise unless x is `what`, and dense."""
    if not isinstance(x, Tensor) or not is_float(x):
        raise TypeError(f"{name} must be {what}, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    check_dense(x, name)


def check_scale_tensor(scale: Tensor, heads: int, q: Tensor) -> Tensor:
    """Return a tensor scale as [H, 1, 1] or [], in float32 or wider."""
    _check_float(scale, "scale", "a number or a tensor of float16 or wider")
    if scale.ndim > 2 and scale.shape[-2:] == (1, 1) and scale.numel() == scale.shape[-3]:  # as it broadcasts over q·kᵀ
        scale = scale.reshape(-1)
    if scale.ndim > 1 or (scale.ndim == 1 and scale.shape[0] not in (1, heads)):
        raise ValueError(
            f"scale must be a number or one per head, ({heads},) or ({heads}, 1, 1), got a tensor {tuple(scale.shape)}"
        )
    scale = scale.to(q.device, torch.promote_types(q.dtype, torch.float32))
    return scale if scale.ndim == 0 else scale[:, None, None]


def split_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split scale = factor / temperature with factor ±1, which is exact in 16 bits; both carry its gradient.

    A scale next to 0 stays a factor, because its inverse would overflow.
    """
    none = scale.abs() < 1e-12
    sign = torch.where(scale < 0.0, -1.0, 1.0).to(scale.dtype)
    return torch.where(none, scale, sign), torch.where(none, 1.0, 1.0 / scale.abs().masked_fill(none, 1.0))


def check_dropout(dropout_p: float, wanted: tuple[str, ...] | None) -> float:
    """Return the probability of dropping a weight, which statistics do not go with."""
    if not isinstance(dropout_p, numbers.Real) or not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1], got {dropout_p!r}")
    if dropout_p and wanted:
        raise ValueError(
            "return_stats with dropout_p > 0 is undefined: statistics describe the weights used, and dropout uses a "
            "random part of them; measure with dropout_p=0.0 (evaluation mode)"
        )
    return float(dropout_p)


def split_policy(temperature) -> tuple[Callable | None, Any, bool]:
    """Split `temperature` into (policy or None, number or tensor or None, whether that value is learned)."""
    if isinstance(temperature, type):
        raise TypeError(f"temperature must be a policy, got the class {temperature.__name__}; make one of it")
    if not callable(temperature) or isinstance(temperature, Tensor):
        return None, temperature, False
    value = getattr(temperature, "value", None)  # of a policy that does not look at the rows
    return (temperature, None, False) if value is None else (None, value, True)


def check_temperature(
    temperature, lead, batch: int, heads: int, queries: int, q: Tensor, *, is_learned: bool = False
) -> tuple[float, Tensor | None]:
    """Return (number, None) or (1, a tensor of 3 dims that broadcasts to [B, H, M]).

    A learned NaN passes: parameters become that when a run diverges, and then its loss shows it.
    """
    if temperature is None:
        return 1.0, None
    if not isinstance(temperature, Tensor):
        if not is_real(temperature):
            raise TypeError(f"temperature must be a number, a tensor or a policy, got {type(temperature).__name__}")
        if not (temperature > 0 and is_finite(temperature)):
            raise ValueError(f"temperature must be positive and finite in attention, got {temperature!r}")
        check_range(temperature, "temperature")
        return float(temperature), None
    _check_float(temperature, "temperature", "a number or a tensor of float16 or wider")
    if readable(temperature):
        values = temperature.detach()
        if not bool((((values > 0) & (values < math.inf)) | (values.isnan() & is_learned)).all()):
            raise ValueError("temperature must be positive and finite; the tensor has other entries")
    wide = temperature.to(q.device).to(accumulator(q.dtype))
    return 1.0, _shape_per_row(wide, "temperature", lead, batch, heads, queries)


def check_policy_result(temperature, policy, rows) -> Tensor:
    """Raise unless a policy returned positive temperatures that broadcast to rows [B, H, M]."""
    name = type(policy).__name__
    if not isinstance(temperature, Tensor) or not is_float(temperature):
        raise TypeError(f"temperature: the policy {name} must return a tensor of float16 or wider, got {temperature!r}")
    if not fits(temperature.shape, rows):
        raise ValueError(
            f"temperature: what the policy {name} returns must broadcast to (B, H, M) = {tuple(rows)}, got shape "
            f"{tuple(temperature.shape)}"
        )
    if readable(temperature):
        least = temperature.detach().amin().item() if temperature.numel() else 1.0
        if least <= 0:
            raise ValueError(f"temperature: the policy {name} must return positive numbers, got {least:g} among them")
    return temperature


def check_softcap(softcap: float | None) -> float | None:
    """Return the soft cap as a float, or None."""
    if softcap is None:
        return None
    if not (is_real(softcap) and softcap > 0 and is_finite(softcap)):
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    check_range(softcap, "softcap")
    return float(softcap)


def check_score_mod(score_mod: Any, softcap: float | None) -> tuple[float | None, ScoreFunction | None]:
    """Return (softcap, score function): a soft cap of one number is `softcap`, whichever argument it came by."""
    if score_mod is None:
        return softcap, None
    if not isinstance(score_mod, ScoreFunction):
        raise TypeError(f"score_mod must be a regard.bias.ScoreFunction or None, got {type(score_mod).__name__}")
    if softcap is not None:
        raise ValueError("softcap and score_mod both change the scores before the bias; give one of them")
    cap = check_softcap(score_mod.softcap)
    return cap, score_mod if cap is None else None


def check_range(number: float, name: str) -> None:
    """Raise unless a positive number leaves float32 logits room."""
    if not 1.0 / LARGEST <= number <= LARGEST:
        raise ValueError(f"{name} must lie between {1.0 / LARGEST:g} and {LARGEST:g}, got {float(number):g}")


def divide_scale(scale: float, temperature: float) -> float:
    """Return scale / temperature, the factor of q·k where neither cap nor bias stands between them."""
    if abs(scale) > LARGEST * temperature:
        raise ValueError(
            f"scale / temperature must lie within ±{LARGEST:g}, got scale={scale:g} and temperature={temperature:g}"
        )
    return scale / temperature


def check_theta(
    choice: Choice, lead, batch: int, heads: int, queries: int, q: Tensor, count_keys: Callable[[], Tensor]
) -> Tensor:
    """Return a normaliser's tensor parameter with 3 dims that broadcast to [B, H, M], in the accumulator's dtype.

    `count_keys` tells how many keys each query sees [B, H, M], for a parameter that is a function of them.
    """
    given: Any = choice.theta
    parameter, rows = choice.normalizer.parameter, (batch, heads, queries)
    assert parameter is not None
    theta = given(count_keys()) if callable(given) and not isinstance(given, Tensor) else given
    if theta is not given and not (isinstance(theta, Tensor) and fits(theta.shape, rows)):
        kind = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(f"{parameter.name}: its function must return a tensor that broadcasts to {rows}, got {kind}")
    wide = check_parameter(theta, parameter).to(q.device, accumulator(q.dtype))
    if theta is given:
        return _shape_per_row(wide, parameter.name, lead, batch, heads, queries)
    return wide.reshape(*(1,) * (3 - wide.ndim), *wide.shape)


def void_outside_kernels(theta: Tensor, choice: Choice) -> Tensor:
    """Return θ with NaN where the kernels cannot compute with it, for tensors whose values cannot be read."""
    parameter = choice.normalizer.parameter
    assert parameter is not None
    if parameter.fused_low == -math.inf and parameter.fused_high == math.inf:
        return theta
    return theta.masked_fill((theta < parameter.fused_low) | (theta > parameter.fused_high), math.nan)


def _shape_per_row(x: Tensor, name: str, lead, batch: int, heads: int, queries: int) -> Tensor:
    """Return a tensor (H,), (…, H, M) or broadcasting to (…, H, M, 1) with 3 dims that broadcast to [B, H, M]."""
    full = (*lead, queries, 1)
    if x.ndim == 1 and x.shape[0] == heads:
        return x.reshape(1, -1, 1)
    if x.shape == full[:-1]:
        return x.reshape(batch, heads, queries)
    if not fits(x.shape, full):
        raise ValueError(f"{name} must have shape ({heads},), {full[:-1]} or broadcast to {full}, got {tuple(x.shape)}")
    while x.ndim < len(full):
        x = x[None]
    x = x.squeeze(-1)  # (…, H, M)
    if len(lead) == 2:
        return x
    return x.expand(*lead, x.shape[-1]).reshape(batch, heads, x.shape[-1])


def check_sink(sink, choice: Choice, heads: int, lead, batch: int, queries: int, q: Tensor) -> Tensor | None:
    """Return the sink with 3 dims that broadcast to [B, H, M], in the accumulator's dtype."""
    if sink is None:
        return None
    if is_real(sink):
        if not is_finite(sink) and isinstance(sink, numbers.Rational):
            raise ValueError("sink must be a number that float64 can hold, got one beyond it")
        sink = q.new_tensor([float(sink)], dtype=accumulator(q.dtype))
    _check_float(sink, "sink", "a number or a tensor of float16 or wider, one logit per head")
    if not choice.softmax_family:
        raise ValueError(f"sink joins the denominator of 'softmax' or 'softmax1', not of {choice.name!r}; drop one")
    wide = sink.to(q.device, accumulator(q.dtype))
    if sink.ndim <= 1:
        if sink.numel() not in (1, heads):
            raise ValueError(f"sink must have one logit per head ({heads}), got {sink.numel()}")
        return wide.reshape(1, -1, 1)
    return _shape_per_row(wide, "sink", lead, batch, heads, queries)


def check_gate(gate: Any, rows: tuple[int, ...], width: int, q: Tensor) -> Tensor | None:
    """Return the gate's logits, which broadcast to rows (…, H, M), one per head, or to (…, H, M, E)."""
    if gate is None:
        return None
    _check_float(gate, "gate", "a tensor of float16 or wider, logits before the sigmoid")
    if gate.device != q.device:
        raise ValueError(f"gate must be on q's device {q.device}, got {gate.device}")
    per_head = gate.ndim == len(rows) or (gate.ndim > len(rows) and gate.shape[-1] == 1)
    full = (*rows, 1 if per_head else width)[: max(gate.ndim, len(rows))]
    if gate.ndim < len(rows) or not fits(gate.shape, full):
        raise ValueError(
            f"gate must broadcast to {rows}, one logit per head, or {(*rows, width)}, one per element, got shape "
            f"{tuple(gate.shape)}"
        )
    return gate
