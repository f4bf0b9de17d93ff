"""What happens between modules: something added twice or left out, a multiplier, an order."""

from __future__ import annotations

from torch import Tensor

from regard.health.comparing.causes.generic import explain_generally
from regard.health.comparing.causes.trial import Trial, fit_factor, name_factor
from regard.health.comparing.record import Key, Run

NEAR = 40  # places before the difference that may be added or left out


def explain_glue(trial: Trial, key: Key, run: Run, numbers: dict[str, float]) -> None:
    """Try how B's tensor at a place follows from what A had there and a little before."""
    explain_generally(trial, numbers)
    a, b = trial.a.double(), trial.b.double()
    if a.shape != b.shape or a.ndim < 2 or any("factor" in text or "times" in text for text, _ in trial.found):
        return
    gap = b - a
    for place, x in _before(run, key, a):
        x = x.double()
        c = fit_factor(x, gap)
        if abs(c) > 1e-6:
            trial.explains("what is added", a + c * x, _say_added(place, c, x is a))
        trial.explains("another input", x, f"B passes on {_name(place)}.")


def _before(run: Run, key: Key, like: Tensor) -> list[tuple[Key, Tensor]]:
    found: list[tuple[Key, Tensor]] = []
    for place, x in run.points.items():
        if place == key:
            break
        if place.part in ("in", "out") and x.shape == like.shape and x.is_floating_point():
            found.append((place, x))
    return found[: -NEAR - 1 : -1]


def _say_added(place: Key, c: float, itself: bool) -> str:
    if abs(c + 1) < 2e-3:
        return f"B leaves out {_name(place)}, which A adds."
    if abs(c - 1) < 2e-3:
        return f"B adds {_name(place)} once more than A."
    return f"B adds {c:.4g} × {_name(place)} more than A{name_factor(1 + c)}: a multiplier of the residual stream."


def _name(place: Key) -> str:
    return f"the {'input' if place.part == 'in' else 'output'} of {place.module or 'the model'}"
