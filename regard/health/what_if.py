"""What-ifs: changes of the scores, tried on the same q, k and mask.

>>> from regard.health.what_if import parse
>>> parse("temperature=2").options, parse("qk_norm").name
({'temperature': 2.0}, 'qk_norm')
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from regard import normalizers
from regard._core.rows.qk_norm import qk_norm
from regard.health.capture.call import Call
from regard.scores import SCALES
from regard.temperature import SSMax

FORMS = ("temperature=2", "scale=inverse", "qk_norm", "softcap=50", "normalizer=entmax15", "ssmax")


@dataclass(frozen=True)
class WhatIf:
    """A change of a call: options of `regard.attention` and, for qk_norm, of q and k."""

    name: str
    options: dict = field(default_factory=dict)
    change_call: Callable[[Call], Call] | None = None

    def __call__(self, call: Call) -> Call:
        changes = dict(self.options)
        if self.change_call:
            changes.setdefault("scale", None)  # normalised q and k take 1/√d, whatever the model's scale
        if "normalizer" in changes and call.options.get("sink") is not None:
            choice = normalizers.get(changes["normalizer"])
            if not choice.softmax_family:
                changes["sink"] = None  # a learned sink needs an exponential denominator
        changed = call.with_options(**changes)
        return self.change_call(changed) if self.change_call else changed


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
    parts = [
        _parse_part(part.strip(), text) for part in re.split(r"(?<!\d[eE])\+(?![^(]*\))", text)
    ]  # not 1e+3, not (+1)
    options: dict = {}
    change_call = None
    for part in parts:
        twice = (
            "qk_norm"
            if change_call and part.change_call
            else next((key for key in part.options if key in options), None)
        )
        if twice:
            why = ", because ssmax is one" if twice == "temperature" and "ssmax" in text else ""
            raise ValueError(f"what_if: {text!r} sets {twice} twice{why}; use separate what-ifs")
        options.update(part.options)
        change_call = change_call or part.change_call
    return WhatIf(text, options, change_call)


def _parse_part(part: str, text: str) -> WhatIf:
    key, _, value = map(str.strip, part.partition("="))
    if key == "qk_norm" and not value:
        return WhatIf(part, change_call=with_qk_norm)
    if key == "ssmax":
        return WhatIf(part, dict(temperature=SSMax(_parse_number(value, text)) if value else SSMax()))
    if key in ("temperature", "softcap") and value:
        return WhatIf(part, {key: _parse_number(value, text)})
    if key == "scale" and value:
        return WhatIf(part, dict(scale=value if value in SCALES else _parse_number(value, text)))
    if key == "normalizer" and value:
        return WhatIf(part, dict(normalizer=normalizers.get(value).spec))
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


def with_qk_norm(call: Call) -> Call:
    """The call with q and k divided by their root mean square."""
    q, k = qk_norm(call.q, call.k)
    return replace(call, q=q, k=k)
