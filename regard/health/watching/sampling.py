"""Samples of a model's forwards: at which steps, within which budget, and the tables that each leaves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.health.capture.forwards import as_written, close_scope, open_scope
from regard.health.capture.interception import Interception
from regard.health.measure.heads import SEES_NOTHING
from regard.health.measure.recorder import Layer, merge_uses
from regard.health.watching.black_box import BlackBox, find_tokens
from regard.health.watching.sample import AT, LayerKey, empty_table, fill_max_logits
from regard.health.watching.taps import LEADING, has_compiled_parts
from regard.health.watching.timed_recorder import MaxLogitRecorder, TimedRecorder

SKIPPED, SKIPPED_SHARE = 20, 0.75  # samples that the budget skipped, and their share, before a warning
MISSED = 3  # consecutive steps without a forward before a warning
LEAST_SECONDS = 600.0  # the budget is that of a training of ten minutes at least

PER_GAP = 10  # samples before the gap doubles; a trend needs as many
DENSE_FROM = 8  # `every` from which on the start is denser than it
CLOSER = 10  # samples in a row that a suspicious head may draw closer

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
        self._attend: set[str] = set()  # names of the modules that were measured
        self._hooks: list[RemovableHandle] = []  # on the blocks around them, while a forward is measured

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
        if self.metrics is None and not has_compiled_parts(self.model):
            self._hook_blocks(recorder)
        recorder.step, recorder.seconds = step, time.perf_counter() - began
        return True

    def _hook_blocks(self, recorder: TimedRecorder) -> None:
        """Has the output of the module around each attention module measured: the residual stream, in most models."""
        modules = dict(as_written(self.model).named_modules())
        for name in self._attend:
            block = modules.get(name.rpartition(".")[0]) if "." in name else None
            if block is not None and not isinstance(block, (nn.ModuleList, nn.Sequential)):
                self._hooks.append(block.register_forward_hook(Hook(partial(recorder.note_block, name))))

    def _close_forward(self, succeeded: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._interceptions.close(succeeded=succeeded)

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
        self._close_forward(succeeded=not has_raised)
        if recorder is None or has_raised:
            return False
        recorder.seconds += time.perf_counter() - finished
        recorder.end_forward()
        self.finished = recorder
        return not recorder.is_on_gpu

    def abort(self) -> None:
        """Closes a sample whose forward was aborted by KeyboardInterrupt; torch runs no hooks then."""
        self._close_forward(succeeded=False)
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
                self._attend.add(layer.name)
                recorder.fill(layer, table)
                if not bool(table[:, AT["rows"]].any()) and any(layer.empty_rows):
                    self._mark_unmeasured(layer, SEES_NOTHING)
            yield layer.index, table

    def _mark_unmeasured(self, layer: Layer, reason: str) -> None:
        self.unmeasured[layer.label] = reason
        self.warn_once(f"unmeasured {layer.label}", f"{layer.label}: not watched: {reason}")


class Schedule:
    """Decides which steps are due; the same on every rank that takes the same samples.

    The first ten samples are one step apart, the next ten two steps, then four, and so on up to `every`, so that a
    short fine-tuning is watched too. With `every` below 8, one step in `every` is sampled from the start. Steps 1,
    1 + every, 1 + 2·every, … are always due.

    >>> from regard.health.watching.sampling import Schedule
    >>> schedule, found = Schedule(every=100), []
    >>> for step in range(1, 40):
    ...     if schedule.is_due(step):
    ...         schedule.take(step)
    ...         found.append(step)
    >>> found[:3], found[-4:]
    ([1, 2, 3], [28, 30, 34, 38])
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.gap = 1 if every >= DENSE_FROM else every
        self._taken_at_gap = 0
        self._closer = 0  # samples taken closer because of suspicious heads
        self._next = 1

    def is_due(self, step: int) -> bool:
        """True if `step` is to be sampled."""
        is_on_grid = (step - 1) % self.every == 0
        return is_on_grid or (step >= self._next and (self.gap < self.every or self._closer > 0))

    def take(self, step: int) -> None:
        """Notes that `step` was sampled, or skipped to save time, and sets the next one."""
        self._taken_at_gap += 1
        if self._taken_at_gap >= PER_GAP and self.gap < self.every:
            self.gap, self._taken_at_gap = min(2 * self.gap, self.every), 0
        self._next = step + self.gap

    def state(self) -> dict[str, int]:
        """Returns where it is, for `load`."""
        return {"gap": self.gap, "taken": self._taken_at_gap, "next": self._next}

    def load(self, state: Mapping[str, int]) -> None:
        self.gap, self._taken_at_gap, self._next = min(state["gap"], self.every), state["taken"], state["next"]

    def look_closer(self, step: int, is_suspicious: bool) -> None:
        """Makes the next step due if a head is suspicious, for a few samples in a row."""
        self._closer = self._closer + 1 if is_suspicious and self._closer < CLOSER else 0
        if self._closer:
            self._next = step + 1


class Hook:
    """A hook that does nothing while torch.compile traces, and in a copy of the model, or a saved one."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call: Callable[..., None] | None = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling() and self.call is not None:
            self.call(*args)

    def __getstate__(self) -> dict[str, None]:
        return {"call": None}


class ForwardInterceptions:
    """Intercepts single forwards of a model, and follows torch's functions only where that has found attention.

    Following them takes a Python call per torch function. It is done in the first forward and in every `EVERY`-th, and
    in all if the last one that did met a function that may be attention, or no attention at all (layer drop).
    """

    EVERY = 20

    def __init__(self) -> None:
        self._made, self._is_needed = 0, True
        self._open: tuple[Interception, contextlib.AbstractContextManager] | None = None

    def open(self, model: nn.Module, observe: Callable) -> None:
        """Intercepts the forward that begins now; called in the model's pre-hook."""
        self.close(succeeded=False)
        follows = self._is_needed or self._made % self.EVERY == 0
        self._made += 1
        interception = Interception(model, observe=observe, follows_functions=follows)
        context = interception.in_forward()
        open_scope(context)
        self._open = interception, context

    def close(self, succeeded: bool) -> None:
        """Ends the interception that is open, if any, and learns from a forward that succeeded.

        A forward that Ctrl-C ends calls no hook: the next one closes it.
        """
        if self._open is None:
            return
        (interception, context), self._open = self._open, None
        close_scope(context)
        if succeeded and interception.follows_functions:
            self._is_needed = interception.saw_functions or not interception.routed
