"""What a rounding of keys, values, scores or weights costs: each head's error, and the layers to leave as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.health.capture.call import Call
from regard.health.probe.probe import Key, Transform
from regard.health.probe.task import WORDS, LossChange, finite
from regard.health.probe.trial import Trial
from regard.health.what_if import WhatIf

MOST_LAYERS = 48  # whose effect on the loss is measured one by one


@dataclass(frozen=True)
class RoundingEffect:
    """The relative error of each head's output under a rounding, and the layers that must be left as they are."""

    errors: dict[tuple[int, int], float]  # (layer's index, head) -> ‖o' − o‖ / ‖o‖, each layer given exact inputs
    keep: list[str] | None = None  # the fewest layers found without whose rounding the loss is no worse; None: unknown
    kept: LossChange | None = None  # the loss with those layers left as they are

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        errors = [dict(index=index, head=head, error=finite(x)) for (index, head), x in self.errors.items()]
        return dict(errors=errors, keep=self.keep, kept=None if self.kept is None else self.kept.to_json())

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoundingEffect:
        """The effect that `to_json` wrote."""
        known = [(one["index"], one["head"], one["error"]) for one in data["errors"]]
        errors = {(index, head): float("nan" if error is None else error) for index, head, error in known}
        kept = data["kept"] and LossChange(*(data["kept"][name] for name in ("loss", "change", "low", "high")))
        return cls(errors, data["keep"], kept)

    def __str__(self) -> str:
        index, head = worst = max(self.errors, key=lambda place: self.errors[place])
        text = f"output errors up to {self.errors[worst]:.2g} (layer {index}, head {head})"
        return f"{text}; with {', '.join(self.keep)} left as they are: {self.kept}" if self.keep else text


def measure_rounding(trial: Trial, change: WhatIf, whole: LossChange | None) -> RoundingEffect:
    """Measures each head's error on the trial's tokens; `whole` is the loss under the change in every layer."""
    errors = output_errors(trial, change)
    if whole is None or whole.word != WORDS["worse"] or not errors:
        return RoundingEffect(errors, [] if whole is not None else None)
    keys = list(trial.captured[1])
    if len(keys) > MOST_LAYERS:
        return RoundingEffect(errors)
    assert trial.task is not None and trial.losses is not None
    task, own = trial.task, trial.losses

    def change_of(rounded: Collection[Key]) -> LossChange:
        return task.compare(own, task.losses(only_in(rounded, change)))

    harm = {key: change_of([key]).change for key in keys}
    order = sorted(keys, key=lambda key: -harm[key])
    low, high, best = 0, len(keys), LossChange(float(own.mean()), 0.0, 0.0, 0.0)  # keeping all is no worse
    while high - low > 1:
        middle = (low + high) // 2
        found = change_of(order[middle:])
        if found.word == WORDS["worse"]:
            low = middle
        else:
            high, best = middle, found
    return RoundingEffect(errors, sorted(name for name, _ in order[:high]), best)


def output_errors(trial: Trial, change: WhatIf) -> dict[tuple[int, int], float]:
    """Returns ‖o' − o‖ / ‖o‖ of every head under the change, each layer given what the model itself computed."""
    errors: dict[tuple[int, int], float] = {}

    def compare(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        own, layer = run(), trial.layer_of(key)
        if layer is not None:
            exact, changed = own.double(), change(call).run().double()
            error, size = (x.square().sum((0, 2, 3)).sqrt() for x in (changed - exact, exact))
            relative = (error / size.clamp_min(1e-30)).tolist()
            errors.update({(layer.index, head): x for head, x in enumerate(relative)})
        return own

    trial.probe.run(trial.tokens, compare)
    return errors


def only_in(keys: Collection[Key], change: WhatIf) -> Transform:
    """A transform that computes the calls of these layers after `change`, the others as they are."""
    return lambda call, key, run: change(call).run() if key in keys else run()
