"""Samples of a model's forwards: at which steps, within which budget, and the tables that each leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from regard.health.capture.forwards import as_written
from regard.health.measure.heads import SEES_NOTHING
from regard.health.measure.recorder import Layer, merge_uses
from regard.health.watching.black_box import BlackBox, find_tokens
from regard.health.watching.hooks import ForwardInterceptions
from regard.health.watching.sample import AT, LayerKey, empty_table, fill_max_logits
from regard.health.watching.schedule import Schedule
from regard.health.watching.taps import LEADING, has_compiled_parts
from regard.health.watching.timed_recorder import MaxLogitRecorder, TimedRecorder

SKIPPED, SKIPPED_SHARE = 20, 0.75  # samples that the budget skipped, and their share, before a warning
MISSED = 3  # consecutive steps without a forward before a warning
LEAST_SECONDS = 600.0  # the budget is that of a training of ten minutes at least

Tables = dict[LayerKey, Tensor]
MakeKey = Callable[[int, str, int], LayerKey]  # order, label, heads -> the key on this rank
Warn = Callable[[str, str], None]  # kind, text


class Sampler:
    """Opens a recorder for the forwards that are due, and reads what it has measured."""

    def __init__(
        self, model: nn.Module, every: int, budget: float, sequences: int | None, metrics: Any, make_key: MakeKey,
        warn_once: Warn,
    ) -> None:  # fmt: skip
        self.model, self.budget, self.sequences, self.metrics = model, budget, sequences, metrics
        self.make_key, self.warn_once = make_key, warn_once
        self.schedule = Schedule(every)
        self.samples = self.left_out = 0  # taken; skipped because of the budget
        self.spent = 0.0  # seconds
        self.started: float | None = None  # when the first forward began
        self.last = 0  # the last step that was sampled
        self.missed = 0  # consecutive steps without a forward
        self.unmeasured: dict[str, str] = {}
        self.finished: TimedRecorder | None = None  # of a forward that is over, and whose numbers were not read
        self._running: TimedRecorder | None = None  # of the one that runs
        self._orders = {name: at for at, (name, _) in enumerate(as_written(model).named_modules())}
        self._interceptions = ForwardInterceptions()

    def note_step(self) -> None:
        """Notes the end of a step, whose forward has set `missed` to 0."""
        self.missed += 1
        if self.missed > MISSED:
            self.warn_once(
                "missed",
                f"Monitor saw {MISSED} steps without a forward of the model in training mode, so nothing is watched. "
                "Pass it the module that a step calls (with Lightning, the one that training_step calls).",
            )

    def elapsed(self) -> float:
        """Seconds since the first forward."""
        return 0.0 if self.started is None else time.perf_counter() - self.started

    def is_due(self, step: int, is_asked: Callable[[int], bool]) -> bool:
        """True if a step is to be sampled, or the budget forbids it; notes that it was decided."""
        self.started = time.perf_counter() if self.started is None else self.started
        if step <= self.last or not (self.schedule.is_due(step) or is_asked(step)):
            return False
        self.last = step
        self.schedule.take(step)
        return True

    def begin(self, step: int, inputs: tuple, named: Mapping[str, Any], first_step: int | None) -> bool:
        """Measures the forward that begins, if the budget allows; `first_step`: from which on it does, over ranks."""
        began = time.perf_counter()
        if not (
            self.spent <= self.budget * max(self.elapsed(), LEAST_SECONDS) if first_step is None else step >= first_step
        ):
            self._skip()
            return False
        if self.metrics is not None and has_compiled_parts(self.model):
            return False  # read in the graph: see `read_taps`
        make = TimedRecorder if self.metrics is None else MaxLogitRecorder
        self._running = recorder = make(sequences=self.sequences)
        recorder.tokens = find_tokens(inputs, named)
        self._interceptions.open(self.model, recorder)
        recorder.step, recorder.seconds = step, time.perf_counter() - began
        return True

    def _skip(self) -> None:
        self.left_out += 1
        due = self.samples + self.left_out
        if self.left_out >= SKIPPED and self.left_out > SKIPPED_SHARE * due:
            self.warn_once(
                "budget",
                f"Monitor skipped {self.left_out} of {due} samples to stay within budget={self.budget:g}: measuring "
                f"took {self.spent:.1f} s so far. What happens in skipped steps is not seen, and warnings of slow "
                "trends need 10 samples. Raise `budget` or `every`.",
            )

    def end(self, has_raised: bool) -> bool:
        """Ends the forward that was measured; True if its numbers may be read without a wait for a GPU."""
        finished, recorder, self._running = time.perf_counter(), self._running, None
        self._interceptions.close(succeeded=not has_raised)
        if recorder is None or has_raised:
            return False
        recorder.seconds += time.perf_counter() - finished
        recorder.end_forward()
        self.finished = recorder
        return not recorder.is_on_gpu

    def abort(self) -> None:
        """Closes a sample whose forward was aborted by KeyboardInterrupt; torch runs no hooks then."""
        self._interceptions.close(succeeded=False)
        self._running = None

    def read(self, box: BlackBox) -> tuple[int, Tables] | None:
        """Returns the step and tables of the forward that was measured last, and fills the black box."""
        if self.finished is None:
            return None
        recorder, self.finished = self.finished, None
        began = time.perf_counter()
        recorder.finish_batch()
        tables = self._make_tables(recorder)
        box.add(recorder.step, recorder.worst_rows(), recorder.tokens)
        if self.samples:  # the first one compiles kernels, which does not count
            self.spent += recorder.count_seconds() + time.perf_counter() - began
        self.samples += 1
        return recorder.step, tables

    def read_taps(self, held: Mapping[str, Tensor]) -> Tables:
        """Returns the tables of the largest logits that compiled graphs have written, by the layer's label."""
        tables = {}
        for label, numbers in held.items():
            largest = numbers[LEADING:].double().cpu()
            if bool((largest == -math.inf).all()):
                continue  # it did not run
            table = empty_table(len(largest))
            fill_max_logits(table, largest)
            table[:, AT["not_finite"]] = (largest.isnan() | largest.isposinf()).double()
            tables[self._key(label, len(largest), label)] = table
        return tables

    def _key(self, name: str, heads: int, label: str) -> LayerKey:
        return self.make_key(self._orders.get(name, 0), label, heads)

    def _make_tables(self, recorder: TimedRecorder) -> Tables:
        """Returns the table of each layer that this rank ran, and notes which could not be measured."""
        layers = merge_uses(recorder.layers.values())
        tables = dict(self._fill_tables(recorder, layers))
        recorder.mark_flags(layers, tables)
        if not layers and not self.samples:
            self.warn_once("unmeasured", "No attention call was seen in the model's forward, so nothing is watched.")
        return {self._key(one.name, one.heads, one.label): tables[one.index] for one in layers if one.index in tables}

    def _fill_tables(self, recorder: TimedRecorder, layers: list[Layer]) -> Iterator[tuple[int, Tensor]]:
        for layer in layers:
            is_measured = recorder.has_measured(layer)
            if not is_measured and not layer.not_finite:
                self._mark_unmeasured(layer, layer.reason or "it was not reached")
                continue
            table = empty_table(layer.heads)
            table[layer.not_finite, AT["not_finite"]] = 1.0 + recorder.is_input_lost(layer)
            if layer.name in recorder.bounded:
                table[:, AT["bounded"]] = 1.0
            if is_measured:
                recorder.fill(layer, table)
                if not bool(table[:, AT["rows"]].any()) and any(layer.empty_rows):
                    self._mark_unmeasured(layer, SEES_NOTHING)
            yield layer.index, table

    def _mark_unmeasured(self, layer: Layer, reason: str) -> None:
        self.unmeasured[layer.label] = reason
        self.warn_once(f"unmeasured {layer.label}", f"{layer.label}: not watched: {reason}")
