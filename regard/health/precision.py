"""Precision: keys, values, scores or weights rounded as serving engines store them, and what that costs.

>>> from regard.health.precision import Rounding
>>> Rounding.parse("kv", "int8/head")
Rounding(what='kv', dtype=torch.int8, scales='head')
>>> Rounding.parse("k", "fp8_e4m3")(torch.tensor([[[[1.0, 0.3]]]]))
tensor([[[[1.0000, 0.2857]]]])

A number x is stored as round(x / s) in the dtype and read as s times that. The scale s is the largest |x| of the
tensor, of a head or of a token, over the dtype's largest number. bf16 and fp16 have no scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard
from regard._call.scores import resolve_scale, soft_cap
from regard._core.gate import apply_gate
from regard.health.capture.call import Call, merge_mask_and_bias

DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # fmt: skip
WHAT = ("q", "k", "v", "kv", "p", "logits")
SCALES = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}  # the axes of [B, H, N, D] that share a scale
UNSCALED = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rounding:
    """What is rounded to which dtype: q, k, v, both of k and v, the weights p, or the scaled scores."""

    what: str
    dtype: torch.dtype
    scales: str = "tensor"

    @classmethod
    def parse(cls, what: str, value: str) -> Rounding:
        """Reads `dtype` or `dtype/scales`; raises ValueError for another."""
        name, _, scales = value.partition("/")
        if name not in DTYPES or (scales or "tensor") not in SCALES:
            raise ValueError(f"{what}={value!r}: give one of {', '.join(DTYPES)}, and /head or /token for finer scales")
        if scales and (what in ("p", "logits") or DTYPES[name] in UNSCALED):
            raise ValueError(f"{what}={value!r}: only q, k and v in 8 bits have scales; leave /{scales} out")
        return cls(what, DTYPES[name], scales or "tensor")

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x as it is read after it was stored."""
        if self.dtype in UNSCALED:
            return x.to(self.dtype).to(x.dtype)
        is_integer = self.dtype == torch.int8
        top = 127.0 if is_integer else torch.finfo(self.dtype).max
        wide = x.float()
        axes = SCALES["tensor" if self.what in ("p", "logits") else self.scales]
        scale = (wide.abs().amax(axes[-x.ndim :], keepdim=True) / top).clamp_min(torch.finfo(torch.float32).tiny)
        stored = wide / scale
        stored = stored.round() if is_integer else stored.to(self.dtype).float()
        return (stored * scale).to(x.dtype)

    def change(self, call: Call) -> Call:
        """Returns the call with this rounding in it."""
        if self.what == "p":
            return call.changed(compute=self._with_rounded_weights)
        if self.what == "logits":
            return _round_scores(call, self)
        rounded: dict[str, Any] = {name: self(getattr(call, name)) for name in self.what}
        return call.changed(**rounded)

    def _with_rounded_weights(self, call: Call) -> Tensor:
        """Returns round(p)·v, with p of the reference."""
        _, p = regard.reference.attention(call.q, call.k, call.v, **call.arguments)
        v = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
        o = (self(p.float()) @ v.float()).to(call.q.dtype)
        gate = call.options.get("gate")
        return o if gate is None else apply_gate(o, gate)


def _round_scores(call: Call, rounding: Rounding) -> Call:
    """Adds round(s) − s to the scores s = cap(scale·q kᵀ) as a bias, so that statistics see the rounded ones."""
    scale = resolve_scale(call.options.get("scale"), call.q.shape[-1])
    if not isinstance(call.mask, Tensor | None) or isinstance(scale, Tensor):
        raise ValueError("rounded logits need a mask tensor and a number as the scale")
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).float()
    s = soft_cap(scale * call.q.float() @ k.transpose(-1, -2), call.options.get("softcap"))
    bias = rounding(s) - s
    mask, causal = merge_mask_and_bias(call.mask, bias, call.causal, *s.shape[-2:])
    return call.changed(mask=mask, causal=causal)
