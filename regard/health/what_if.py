"""What-ifs: changes of the scores, tried on the same q, k and mask, and what is rounded as serving engines store it.

>>> from regard.health.what_if import Rounding, parse
>>> parse("temperature=2").options, parse("qk_norm").name
({'temperature': 2.0}, 'qk_norm')
>>> Rounding.parse("kv", "int8/head")
Rounding(what='kv', dtype=torch.int8, scales='head')
>>> Rounding.parse("k", "fp8_e4m3")(torch.tensor([[[[1.0, 0.3]]]]))
tensor([[[[1.0000, 0.2857]]]])

A number x is stored as round(x / s) in the dtype and read as s times that. The scale s is the largest |x| of the
tensor, of a head or of a token, over the dtype's largest number. bf16 and fp16 have no scale.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard
from regard import normalizers
from regard._call.scores import SCALES, resolve_scale, soft_cap
from regard._core.formulas import apply_gate, qk_norm
from regard.health.capture.call import Call, merge_mask_and_bias
from regard.temperature import SSMax

DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # fmt: skip
WHAT = ("q", "k", "v", "kv", "p", "logits")
AXES = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}  # the axes of [B, H, N, D] that share a scale
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
        if name not in DTYPES or (scales or "tensor") not in AXES:
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
        axes = AXES["tensor" if self.what in ("p", "logits") else self.scales]
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
    scale, call = resolve_scale(call.options.get("scale"), call.q.shape[-1]), call.densified()
    if not isinstance(call.mask, Tensor | None) or isinstance(scale, Tensor):
        raise ValueError("rounded logits need a mask tensor and a number as the scale")
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).float()
    s = soft_cap(scale * call.q.float() @ k.transpose(-1, -2), call.options.get("softcap"))
    bias = rounding(s) - s
    mask, causal = merge_mask_and_bias(call.mask, bias, call.causal, *s.shape[-2:])
    return call.changed(mask=mask, causal=causal)


FORMS = (
    "temperature=2", "scale=inverse", "qk_norm", "softcap=50", "normalizer=entmax15", "ssmax", "kv=fp8_e4m3",
    "logits=bf16", "p=bf16",
)  # fmt: skip


@dataclass(frozen=True)
class WhatIf:
    """A change of a call: options of `regard.attention`, q and k over their root mean square, and roundings."""

    name: str
    options: dict = field(default_factory=dict)
    qk_norm: bool = False
    roundings: tuple[Rounding, ...] = ()

    def __call__(self, call: Call) -> Call:
        changes = dict(self.options)
        if "normalizer" in changes and call.options.get("sink") is not None:
            if not normalizers.get(changes["normalizer"]).softmax_family:
                changes["sink"] = None  # a learned sink needs an exponential denominator
        if self.qk_norm:
            q, k = qk_norm(call.q, call.k)
            call, changes = call.changed(q=q, k=k), {"scale": None, **changes}  # 1/√d, whatever the model's scale
        call = call.with_options(**changes)
        for rounding in self.roundings:
            call = rounding.change(call)
        return call


def parse_all(wanted: str | Iterable[str]) -> list[WhatIf]:
    """The changes that one string, or several, describe."""
    if not isinstance(wanted, Iterable):
        raise TypeError(f"what_if must be strings such as {FORMS[0]!r}, got {type(wanted).__name__}")
    changes = [parse(one) for one in ([wanted] if isinstance(wanted, str) else wanted)]
    return list({change.name: change for change in changes}.values())  # without repetitions


def parse(text: str) -> WhatIf:
    """The change that `name=value`, a bare name, or several of these joined by + describe."""
    if not isinstance(text, str):
        raise TypeError(f"what_if must hold strings such as {FORMS[0]!r}, got {type(text).__name__}")
    options: dict = {}
    for part in re.split(r"(?<!\d[eE])\+(?![^(]*\))", text):  # not 1e+3, not (+1)
        name, value = _parse_part(part, text)
        if name in options:
            why = ", because ssmax is one" if name == "temperature" and "ssmax" in text else ""
            raise ValueError(f"what_if: {text!r} sets {name} twice{why}; use separate what-ifs")
        options[name] = value
    has_norm = options.pop("qk_norm", False)
    roundings = [options.pop(name) for name in WHAT if name in options]
    return WhatIf(text, options, has_norm, tuple(roundings))


def _parse_part(part: str, text: str) -> tuple[str, Any]:
    """The option that one part sets, and its value."""
    key, _, value = map(str.strip, part.partition("="))
    if key == "qk_norm" and not value:
        return key, True
    if key == "ssmax":
        return "temperature", SSMax(_parse_number(value, text)) if value else SSMax()
    if key in ("temperature", "softcap") and value:
        return key, _parse_number(value, text)
    if key == "scale" and value:
        return key, value if value in SCALES else _parse_number(value, text)
    if key in WHAT and value:
        try:
            return key, Rounding.parse(key, value)
        except ValueError as error:
            raise ValueError(f"what_if: {error}") from None
    if key == "normalizer" and value:
        return key, normalizers.get(value).spec
    known = {form.partition("=")[0]: form for form in FORMS}
    known = {**{name: f"normalizer={name}" for name in normalizers.names()}, **known}
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {known[near[0]]!r}? " if near else ""
    raise ValueError(f"what_if: {text!r} is not understood; {hint}known forms: {', '.join(FORMS)}")


def _parse_number(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise ValueError(f"what_if: {text!r} needs a positive number after '=', got {value!r}")
    return number
