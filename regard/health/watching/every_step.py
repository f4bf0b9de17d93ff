"""What a monitor knows of every step: its loss and gradient, a few logits and values, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor, nn

from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.measure.side_stream import HostCopies
from regard.health.watching.bands import LossBand
from regard.health.watching.incidents import (
    DEAD,
    LARGE,
    LOSSES,
    NOT_FINITE,
    ROOTS,
    SMALL,
    Alarm,
    Incidents,
    cause_of,
)  # fmt: skip
from regard.health.watching.pulse import Pulse
from regard.health.watching.symptoms import NOWHERE, Symptom

SHIFT = math.log(1.25)  # change of the norms of q and k, or five times that of logits, from which attention has moved
PATIENCE = 8  # steps that a loss outside its band waits for a sample of attention
EXPLAINS = (LARGE, SMALL, NOT_FINITE, DEAD, *ROOTS)  # causes that explain a jump of the loss
STILL = 3  # steps with a gradient of 0
NO_STEP = (
    "The model ran compiled and Monitor was told of no step, so nothing was logged. Call monitor.step(loss=…) after "
    "each step, or pass Monitor what torch.compile returned."
)
ONLY_LOGITS = (
    "The model runs compiled, so of its attention the largest logits alone are watched. Pass Monitor what "
    'torch.compile returned to watch all of it, or metrics=("max_logit",).'
)
HISTORY = 50  # samples whose norms are kept


class EveryStep:
    """The numbers of every step of one training, and the incidents that they show."""

    def __init__(self, incidents: Incidents) -> None:
        self.incidents = incidents
        self.loss, self.gradient = LossBand(), LossBand(spreads=2.0, share=0.3, rises=False)
        self.pulse: Pulse | None = None  # while the model is watched
        self.last_finite = 0  # the last step that was
        self._largest = LossBand(spreads=2.0, share=0.1, rises=False)  # of the pulse's largest logits
        self._sudden: list[Symptom] = []  # of the pulse, that were not told
        self._still = 0  # consecutive steps with a gradient of 0
        self._given = HostCopies()  # losses and norms that the user passed in
        self._weights: dict[str, Any] = {"highest": 0.0, "levels": [], "tops": []}  # while the model is not watched
        self._history: list[tuple[int, float, float]] = []  # step, norm of q and k, largest logit of each sample

    def start(self, model: nn.Module) -> None:
        self.pulse = Pulse(model)
        self.pulse.weights.load(self._weights)

    def begin_forward(self, inputs: Iterable[Any]) -> None:
        """Looks at the batch of a forward."""
        if self.pulse is not None:
            self.pulse.begin_forward(inputs)

    def stop(self) -> None:
        if self.pulse is not None:
            self._weights = self.pulse.weights.state()
            self.pulse.close()
        self.pulse = None

    def has_seen_graphs(self) -> bool:
        """True if a compiled graph ever made a call."""
        return self.pulse is not None and self.pulse.has_seen()

    def observe(self, step: int, name: str, value: Any) -> str:
        """Takes the loss or the gradient's norm of a step, tensors without a wait; returns why it cannot."""
        band = {"loss": self.loss, "grad_norm": self.gradient}[name]
        if isinstance(value, Tensor) and value.numel() == 1:
            self._given.add(value.detach().reshape(1).float(), partial(self._take, band, step))
            self._given.start()
        elif isinstance(value, Real) and not isinstance(value, bool):
            self._take(band, step, value)
        elif value is not None:
            shape = f" {list(value.shape)}" if hasattr(value, "shape") else ""
            return f"{name} is not watched: it must be a number or a tensor of one, got {type(value).__name__}{shape}"
        return ""

    def _take(self, band: LossBand, step: int, value: Any) -> None:
        usual = band.middle
        band.add(step, float(value))
        if band is self.gradient:
            self._still = self._still + 1 if band.last == 0.0 else 0
            if self._still == STILL and usual > 0.0:
                text = f"the gradient's norm is 0 in {STILL} steps in a row, {usual:.2g} before"
                self._sudden.append(Symptom("no gradient", "warning", NOWHERE, 0.0, text))

    def read(self, step: int) -> tuple[bool, bool]:
        """Reads what the step before has left; returns whether there was anything, and whether it looks wrong."""
        self._given.finish()
        trouble, pulse, find_open = (
            self.loss.is_suspicious or self.gradient.is_suspicious,
            self.pulse,
            self.incidents.find_open,
        )
        if pulse is None or not pulse.read():
            return False, trouble
        if pulse.is_finite:
            self.last_finite = pulse.step or 0
        self._largest.add(step - 1, pulse.largest)
        self._sudden += pulse.sudden
        trouble |= any(not find_open(cause_of(one)) for one in pulse.sudden)
        trouble |= self._largest.is_suspicious and pulse.largest > LOGIT_LIMIT / 4
        trouble |= not pulse.is_finite and not find_open(NOT_FINITE)
        return True, trouble or (pulse.largest > LOGIT_LIMIT and not find_open())

    def note_sample(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keeps what a sample says of attention, to tell later whether it has moved."""
        norms = scalars.get("attention/q_norm", math.nan) + scalars.get("attention/k_norm", math.nan)
        self._history = [*self._history[1 - HISTORY :], (step, norms, scalars.get("attention/max_logit", math.nan))]

    def describe(self) -> dict[str, Any]:
        """Returns what this rank has seen since the last call of its loss and of sudden changes, as plain values."""
        band, output_lost = self.loss, self.pulse is not None and not self.pulse.is_finite
        is_lost = math.isinf(band.last) or (band.outside > 0 and math.isnan(band.last))
        sudden, self._sudden = self._sudden, []
        return {
            "lost": "the loss" if is_lost else "an output or a logit" if output_lost else "", "last": band.last,
            "middle": band.middle, "jumped": band.has_jumped, "leapt": band.has_leapt, "first": band.first_outside,
            "outside": band.outside, "settled": band.settled, "sudden": sudden,
        }  # fmt: skip

    def judge(self, step: int, loss: Mapping[str, Any]) -> list[Alarm]:
        """Opens incidents where numbers of every step have jumped or are lost; resolves them where they are back."""
        incidents, is_finite = self.incidents, math.isfinite(loss["last"])
        found = [Symptom(kind, severity, tuple(place), *rest) for kind, severity, place, *rest in loss["sudden"]]
        incidents.is_lost = bool(loss["lost"])
        if loss["lost"] and not incidents.find_open(NOT_FINITE):
            text = f"{loss['lost']} is NaN or infinite; the last finite step was {self.last_finite}"
            found.append(Symptom("not finite", "critical", NOWHERE, 0.0, text))
        elif loss["jumped"] and is_finite and not found and not incidents.find_open(*LOSSES, *EXPLAINS):
            found += self._explain_loss(loss, loss["first"] or step + 1)
        alarms = incidents.tell(step, found)
        if not loss["outside"] and is_finite:
            for one in [one for one in incidents.all if one.resolved is None and one.cause in LOSSES]:
                if loss["settled"] is None:
                    alarms.append(incidents.close(one, step, "the loss is back in its band"))
                elif one.settled is None:
                    since, before, _ = loss["settled"]
                    text = f"the loss stays at {loss['middle']:.3g} since step {since}, {before:.3g} before"
                    alarms.append(incidents.close(one, step, text, "settled"))
        return alarms

    def _explain_loss(self, loss: Mapping[str, Any], since: int) -> Iterator[Symptom]:
        """Yields what a loss that has left its band comes with, once a sample since then tells of attention."""
        moved = self._has_moved(since)
        if moved is None and loss["outside"] < PATIENCE:
            return
        rest = {None: "attention was not measured since", True: "attention moved with it",
                False: "attention is as it was before"}[moved]  # fmt: skip
        kind = "loss" if loss["leapt"] or moved else "loss rising"
        text = f"the loss is {loss['last']:.3g}, {loss['middle']:.3g} before step {since}; {rest}"
        yield Symptom(kind, "warning", NOWHERE, float(bool(moved)), text)

    def _has_moved(self, since: int) -> bool | None:
        """True if the norms of q and k, or the largest logit, are others than before a step; None if not measured."""
        before = [one for one in self._history if one[0] < since][-2:]
        after = [one for one in self._history if one[0] > since]
        if not before or not after:
            return None

        def ratio(at: int) -> float:
            return abs(math.log(max(after[-1][at], 1e-9) / max(sum(one[at] for one in before) / len(before), 1e-9)))

        return ratio(1) > SHIFT or ratio(2) > 5 * SHIFT

    def state(self) -> dict[str, Any]:
        weights = self._weights if self.pulse is None else self.pulse.weights.state()
        return {"loss": self.loss.state(), "gradient": self.gradient.state(), "weights": weights}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        self.loss.load(state["loss"])
        self.gradient.load(state["gradient"])
        self.last_finite = step
        if "weights" in state:
            self._weights = dict(state["weights"])
            if self.pulse is not None:
                self.pulse.weights.load(self._weights)
