"""What-ifs: changes of the scores, tried on the same q, k and mask.

>>> from regard.health.what_if import parse
>>> parse("temperature=2").options, parse("qk_norm").name
({'temperature': 2.0}, 'qk_norm')
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from regard import normalizers
from regard._call.scores import SCALES
from regard._core.rows.qk_norm import qk_norm
from regard.health.capture.call import Call
from regard.health.precision import WHAT, Rounding
from regard.temperature import SSMax

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
