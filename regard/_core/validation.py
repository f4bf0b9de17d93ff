"""Checks each argument of attention by itself and brings it to the shape that a `Problem` keeps it in."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._core.dtypes import accumulator
from regard._core.mask.parts import INTEGERS, check_side
from regard._core.readable import readable
from regard._core.rows.validation import check_dense, check_scores, fits, is_autocast, is_float
from regard._core.rows.validation import check_theta as check_parameter
from regard.normalizers import Choice
from regard.score_function import ScoreFunction
from regard.scores import is_finite

LARGEST = 1e20  # of a temperature, a soft cap and their inverses: logits then stay within float32


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
        raise ValueError(f"q has {heads} heads and k has {kv_heads}: they do not fit{hint}")
    if not enable_gqa:
        heads = max(heads, kv_heads) if 0 not in (heads, kv_heads) else 0
        kv_heads = heads
    try:
        outer = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ValueError(
            f"the leading dims of q, k and v must broadcast, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        ) from None
    lead = (*outer, heads)
    if q.ndim == 3 and by_entry and sink is None and not enable_gqa:
        return lead, heads, 1, 1  # (N, L, D): torch's N is a batch, which key_lengths counts
    return lead, math.prod(outer), heads, kv_heads


def check_scale_tensor(scale: Tensor, heads: int, q: Tensor) -> Tensor:
    """Return a tensor scale as [H, 1, 1] or [], in float32 or wider."""
    check_dense(scale, "scale")
    if not is_float(scale):
        raise TypeError(f"scale must be a number or a tensor of float16 or wider, got {scale.dtype}")
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


def check_mask(mask, lead, batch: int, heads: int, queries: int, keys: int, q: Tensor) -> Tensor:
    """Return the mask with 4 dims that broadcast to [B, H, M, N], expanded no more than needed."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    check_dense(mask, "attn_mask")
    if mask.dtype != torch.bool and not is_float(mask):
        raise TypeError(f"attn_mask must be bool (True = visible) or float16 or wider (added), got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {mask.device}")
    full = (*lead, queries, keys)
    if not fits(mask.shape, full):
        raise ValueError(f"attn_mask must broadcast to {full}, got {tuple(mask.shape)}")
    may_shrink = _may_undo_expand(mask)
    while mask.ndim < len(full):
        mask = mask[None]
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded by the caller: one copy is enough, and its gradient the sum
            mask = mask.narrow(dim, 0, 1) if may_shrink else mask.contiguous()
    inner = mask.shape[-2:]
    outer = mask.shape[:-2]
    if len(lead) == 2:
        return mask
    if len(lead) < 2:
        mask = mask.reshape(*(1,) * (2 - len(lead)), *outer, *inner)
        return mask.transpose(0, 1) if len(lead) == 1 and heads == 1 and batch != 1 else mask
    if all(size == 1 for size in outer[:-1]):
        return mask.reshape(1, outer[-1], *inner)
    return mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(batch, outer[-1], *inner)


def _may_undo_expand(mask: Tensor) -> bool:
    """True if one entry may stand for all its expanded copies: not if each copy has a gradient of its own."""
    if not mask.requires_grad:
        return True
    if torch.compiler.is_compiling() or mask.is_leaf or mask.retains_grad:
        return False
    return mask.grad_fn is not None and mask.grad_fn.name().startswith("Expand")


def check_window(window) -> tuple[int | None, int | None]:
    """Return (left, right), each None or a number of keys."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), each a number of keys or None, got {window!r}")
    left, right = window
    return check_side(left, "window's left side"), check_side(right, "window's right side")


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
    check_dense(temperature, "temperature")
    if not is_float(temperature):
        raise TypeError(f"temperature must be a number or a tensor of float16 or wider, got {temperature.dtype}")
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
        raise TypeError(f"score_mod must be a regard.ScoreFunction or None, got {type(score_mod).__name__}")
    if softcap is not None:
        raise ValueError("softcap and score_mod both change the scores before the bias; give one of them")
    cap = check_softcap(score_mod.softcap)
    return cap, score_mod if cap is None else None


def is_real(x: Any) -> bool:
    """True for a real number that is no bool."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


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
    theta, parameter = choice.theta, choice.normalizer.parameter
    assert parameter is not None
    if isinstance(theta, Tensor):
        theta = check_parameter(theta, parameter).to(q.device, accumulator(q.dtype))
        return _shape_per_row(theta, parameter.name, lead, batch, heads, queries)
    assert callable(theta)
    theta = theta(count_keys())
    rows = batch, heads, queries
    if not isinstance(theta, Tensor) or not fits(theta.shape, rows):
        kind = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(f"{parameter.name}: its function must return a tensor that broadcasts to {rows}, got {kind}")
    theta = check_parameter(theta, parameter).to(q.device, accumulator(q.dtype))
    return theta.reshape(*(1,) * (3 - theta.ndim), *theta.shape)


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


def check_key_lengths(key_lengths, batch: int, keys: int, q: Tensor, name: str = "key_lengths") -> Tensor | None:
    """Return key_lengths as int32 [B] on q's device."""
    if key_lengths is None:
        return None
    if not isinstance(key_lengths, Tensor):
        try:
            key_lengths = torch.tensor([operator.index(n) for n in key_lengths], dtype=torch.int64, device="cpu")
        except TypeError:
            raise TypeError(f"{name} must be ints, one per batch entry, got {key_lengths!r}") from None
        except (ValueError, RuntimeError):  # beyond int64
            raise ValueError(f"{name} must lie in [0, {keys}], got {key_lengths!r}") from None
    check_dense(key_lengths, name)
    if key_lengths.dtype not in INTEGERS:
        raise TypeError(f"{name} must be integers, got {key_lengths.dtype}")
    if key_lengths.ndim != 1 or key_lengths.shape[0] != batch:
        raise ValueError(f"{name} must have shape ({batch},), one per batch entry, got {tuple(key_lengths.shape)}")
    if readable(key_lengths):
        if key_lengths.numel() and not bool(((key_lengths >= 0) & (key_lengths.long() <= keys)).all()):
            raise ValueError(f"{name} must lie in [0, {keys}], got {key_lengths.tolist()[:8]}")
    return key_lengths.to(q.device, torch.int32)


def check_sink(sink, choice: Choice, heads: int, lead, batch: int, queries: int, q: Tensor) -> Tensor | None:
    """Return the sink with 3 dims that broadcast to [B, H, M], in the accumulator's dtype."""
    if sink is None:
        return None
    if is_real(sink):
        if not is_finite(sink) and isinstance(sink, numbers.Rational):
            raise ValueError("sink must be a number that float64 can hold, got one beyond it")
        sink = q.new_tensor([float(sink)], dtype=accumulator(q.dtype))
    if not isinstance(sink, Tensor) or not is_float(sink):
        kind = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise TypeError(f"sink must be a number or a tensor of float16 or wider, one logit per head, got {kind}")
    check_dense(sink, "sink")
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
    if not isinstance(gate, Tensor) or not is_float(gate):
        kind = gate.dtype if isinstance(gate, Tensor) else type(gate).__name__
        raise TypeError(f"gate must be a tensor of float16 or wider, logits before the sigmoid, got {kind}")
    check_dense(gate, "gate")
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
