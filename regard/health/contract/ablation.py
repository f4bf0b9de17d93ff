"""Ablation: the loss without each head, and without each layer's attention, by running the model without them.

The output of a head is set to 0 and the rest of the model computed as it is, so the number is exact for the text that
was run. A model without a loss gets the relative change of its output instead.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.health.probe.probe import Key, Transform, relative_change, remove_heads
from regard.health.probe.task import GIVEN, LABELS, finite
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

SEQUENCES, LENGTH = 6, 128  # of the text
LOSS, OUTPUT = "loss", "output"
IDLE = 0.002  # of the loss, or of the output's size: heads that change less do not matter on this text


@dataclass
class Ablation:
    """What removing a head, or a layer's attention, does: `heads[(index, head)]` and `layers[index]`."""

    unit: str  # "loss": nats added; "output": relative change of the output
    own: float  # the loss with all heads; 0 for "output"
    heads: dict[tuple[int, int], float] = field(default_factory=dict)
    layers: dict[int, float] = field(default_factory=dict)
    missing: int = 0  # heads that the budget left out
    seconds: float = 0.0
    sequences: int = 0

    @property
    def small(self) -> float:
        """The effect below which a head does not matter."""
        return IDLE * (abs(self.own) if self.unit == LOSS else 1.0)

    def to_json(self) -> dict[str, Any]:
        return dict(
            unit=self.unit, own=finite(self.own),
            heads=[dict(index=index, head=head, change=finite(x)) for (index, head), x in self.heads.items()],
            layers=[dict(index=index, change=finite(x)) for index, x in self.layers.items()], missing=self.missing,
            seconds=round(self.seconds, 3), sequences=self.sequences,
        )  # fmt: skip


class Ablator:
    """Runs a model without some of its heads."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.batches = [trial.batches[0].cut(SEQUENCES, LENGTH)] if trial.batches else []
        task = trial.task
        if task is not None:
            given = task.kind in (GIVEN, LABELS)
            batches: list[TokenBatch] = list(task.batches[:2]) if given else [task.batches[0].cut(SEQUENCES, LENGTH)]
            task = task.on(batches)
        self.task = task
        self.unit = OUTPUT if task is None else LOSS
        self.own = self._run(None)

    def _run(self, transform: Transform | None) -> Tensor:
        if self.task is not None:
            return self.task.losses(transform)
        return self.trial.probe.run(self.batches[0], transform)

    def measure(self, heads: Iterable[tuple[Key, int]]) -> float:
        """The effect of removing these heads together."""
        changed = self._run(remove_heads(heads))
        if self.task is not None:
            return float((changed - self.own).mean())
        return relative_change(self.own, changed)

    @property
    def own_loss(self) -> float:
        return float(self.own.mean()) if self.unit == LOSS else 0.0


def ablate(trial: Trial, ablator: Ablator, seconds: float) -> Ablation:
    """Removes each layer's attention, then each head, until the budget of seconds is spent.

    Heads are taken in an order that serves all layers alike: head 0 of every layer, then head 1, …
    """
    result = Ablation(ablator.unit, ablator.own_loss, sequences=len(ablator.own))
    layers = [layer for layer in trial.layers if layer.reading is not None and layer.heads and not layer.together]
    started = time.perf_counter()
    for layer in layers:
        if time.perf_counter() - started < seconds:
            key = layer.name, layer.use
            result.layers[layer.index] = ablator.measure((key, head) for head in range(layer.heads))
    places = [(head, layer) for layer in layers for head in range(layer.heads)]
    for head, layer in sorted(places, key=lambda place: place[0]):
        if layer.heads == 1 and layer.index in result.layers:
            result.heads[layer.index, head] = result.layers[layer.index]
        elif time.perf_counter() - started < seconds:
            result.heads[layer.index, head] = ablator.measure([((layer.name, layer.use), head)])
        else:
            result.missing += 1
    result.seconds = time.perf_counter() - started
    return result


def describe_effect(ablator: Ablator, places: list[tuple[Key, int]]) -> str:
    """What removing a finding's heads does, in a sentence."""
    effect = ablator.measure(places)
    heads = "this head" if len(places) == 1 else "these heads"
    if ablator.unit == LOSS:
        own = ablator.own_loss
        of = "1 sequence" if len(ablator.own) == 1 else f"{len(ablator.own)} sequences"
        numbers = f"the loss on {of} goes from {own:.3g} to {own + effect:.3g}"
        idle = abs(effect) <= IDLE * abs(own)
    else:
        numbers, idle = f"the model's output changes by {effect:.2g} of its size", effect <= IDLE
    verdict = (
        ": they do not matter on this text" if idle and len(places) > 1 else ": it does not matter" if idle else ""
    )
    return f" Without {heads} {numbers}{verdict}."
