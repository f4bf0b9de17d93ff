"""A look at every step that costs nothing measurable: is all finite, how large are a few logits and values?

The taps (`taps.py`) look at 16 rows of one sequence in each attention call; of the model's output, one number per row
is summed, or its loss read. What they find stays on the device and is fetched while the next step runs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.measure.side_stream import HostCopies
from regard.health.watching import taps
from regard.health.watching.bands import Level
from regard.health.watching.symptoms import Symptom
from regard.table import format_number

GROWN, FALLEN = 8.0, 1.0 / 3.0  # a largest logit, and the norm of values, beside the steps before


class Pulse:
    """The looks at the steps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.taps = taps.Taps(model, whole=True, eagerly=True)
        self.largest = -math.inf  # of the step that was read last; NaN where a logit was not finite
        self.is_finite = True  # was its output?
        self.step: int | None = None  # whose numbers were read last
        self.layers: dict[str, Tensor] = {}  # what the taps of the last forward held
        self.sudden: list[Symptom] = []  # changes from one step to the next, of the step that was read last
        self._levels: dict[str, tuple[Level, Level]] = {}  # layer -> of its largest logit and its values
        self._copies = HostCopies()

    def end_forward(self, step: int, output: Any) -> None:
        """Starts to fetch what the forward has left."""
        self.layers = self.taps.read()
        flag = _sum_of(output)
        if not self.layers and flag is None:
            return
        device = next(iter(self.layers.values())).device if self.layers else flag.device  # type: ignore[union-attr]
        parts = [torch.zeros(1, device=device) if flag is None else flag.to(device).reshape(1)]
        parts += [held.to(device) for held in self.layers.values()]
        sizes = {name: len(held) for name, held in self.layers.items()}
        self._copies.add(torch.cat(parts), partial(self._receive, step=step, sizes=sizes))
        self._copies.start()

    def read(self) -> bool:
        """Reads what the last forward has left; True if there was anything."""
        before, self.sudden = self.step, []
        self._copies.finish()
        return self.step != before

    def _receive(self, numbers: Tensor, step: int, sizes: dict[str, int]) -> None:
        total, *held = numbers.split([1, *sizes.values()])
        self.largest = max((float(one[1:].amax()) for one in held), default=-math.inf, key=_nan_first)
        if self.largest == -math.inf and sizes and not float(total):
            return  # no graph ran
        self.is_finite, self.step = math.isfinite(float(total)) and not math.isnan(self.largest), step
        for name, one in zip(sizes, held, strict=True):
            self._follow(name, float(one[0]), float(one[1:].amax()))

    def _follow(self, name: str, value: float, largest: float) -> None:
        """Notes a layer whose logits have grown, or whose values have shrunk, between two steps."""
        of_logit, of_value = self._levels.setdefault(name, (Level(GROWN), Level(FALLEN)))
        if math.isfinite(largest) and (found := of_logit.add(largest)) is not None and found[1] > LOGIT_LIMIT:
            text = f"the largest logit of {name} rose from {format_number(found[0])} to {format_number(found[1])}"
            self.sudden.append(Symptom("jumped", "warning", (name, -1), found[1], f"{text} between two steps"))
        if math.isfinite(value) and (found := of_value.add(value)) is not None:
            text = f"the norm of the values of {name} fell from {format_number(found[0])} to {format_number(found[1])}"
            self.sudden.append(Symptom("values fell", "warning", (name, -1), found[1], f"{text} between two steps"))

    def has_seen(self) -> bool:
        """True if a call was ever made in a compiled graph."""
        return self.taps.has_seen()

    def close(self) -> None:
        self.taps.close()


def _nan_first(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _sum_of(output: Any) -> Tensor | None:
    """Returns the loss of an output, or the sum of the first entries of its rows: finite if they are."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()).float()
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
    x = next((x for x in parts if isinstance(x, Tensor) and x.is_floating_point() and x.numel()), None)
    if x is None or taps.is_unreadable(x):
        return None
    with torch.no_grad():
        return (x.detach()[..., 0] if x.ndim > 1 else x.detach()).sum(dtype=torch.float32).reshape(())
