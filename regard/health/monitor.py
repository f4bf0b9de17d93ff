"""`Monitor`: measure attention during training on a sample of steps, log scalars, raise alarms.

When a sample raises one is decided in `watching/alarms.py`.
"""

from __future__ import annotations

import atexit
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.health.capture.interception import as_written, find_caller
from regard.health.measurement.recorder import Layer, merge_uses
from regard.health.readings.heads import SEES_NOTHING
from regard.health.watching.alarms import Alarm, AlarmRules
from regard.health.watching.hooks import ForwardInterceptions, Hook, runs_compiled
from regard.health.watching.ranks import Ranks
from regard.health.watching.sample import AT, LayerKey, empty_table, flags_of, head_rows, scalars_of, series_names
from regard.health.watching.schedule import Schedule
from regard.health.watching.timed_recorder import MaxLogitRecorder, TimedRecorder
from regard.health.watching.validation import check_arguments
from regard.health.watching.writers import Several, Writer, make_writer

MISSED = 3  # consecutive steps without a forward before a warning
SKIPPED, SKIPPED_SHARE = 20, 0.75  # samples that the budget skipped, and their share, before a warning
LEAST_SECONDS = 600.0  # the budget is that of a training of ten minutes at least
IN_TROUBLE = 8  # heads whose own numbers are logged because a finding has them


class AttentionWarning(UserWarning):
    """Warns that a head is unhealthy or about to be, or that something is not watched."""


class Monitor:
    """Measures attention on a sample of training steps, logs scalars per layer and over the model, raises alarms.

    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True, dropout=0.0)
    >>> rows = []
    >>> monitor = regard.Monitor(layer, every=2, log=rows.append)
    >>> for step in range(3):
    ...     loss = layer(torch.randn(2, 8, 32)).square().mean()
    >>> monitor.close()
    >>> [row["step"] for row in rows], 0.0 < rows[0]["attention/entropy_ratio_min"] <= 1.0
    ([1, 3], True)
    >>> monitor
    Monitor(TransformerEncoderLayer, every=2): 2 samples up to step 3, layers watched: 1, not watched: 0, alarms: 0
    >>> monitor.alarms
    []

    Args:
        model: the model in training. Each forward in training mode is a step; nothing else needs to be called.
        every: measure one step in this many; from 8 on the start is denser (gaps of 1, 2, 4, … steps, ten of each).
        log: where the numbers go: a path (JSONL), a TensorBoard writer, a Weights & Biases run, MLflow, a Lightning
            logger, a `transformers.Trainer`, an `accelerate.Accelerator`, an object with `log`, a function that takes a
            dict, or None. A number that a sample lacks (an entropy ratio if all rows see one key) is NaN, in a file
            null, and no point in a series.
        heads: True to log every head as well. Otherwise heads are logged only while a finding has them, 8 at most.
        metrics: None for all, or ("max_logit",) to measure the largest logit alone, which is cheap enough for every=1.
        on_alarm: a function that is called with each `Alarm`.
        budget: the fraction of the training time that measuring may take, of ten minutes at least; a sample that would
            exceed it is skipped. Warns once if most samples are skipped.
        sequences: how many sequences of a batch are measured; None for all.
        group: the process group whose ranks are reduced into one log, of which the first writes; None is all ranks. A
            monitor has to be made on each of them.
        tensor_group: the ranks that hold different heads of the same layers (tensor parallel).
        pipeline_group: the ranks that hold different layers. Call `at_step` before and `end_step` after each step then;
            the callbacks do it.

    On a GPU, in one process, a sample is read when the next forward begins, because the GPU is still at work when its
    own forward ends; `end_step`, `close` and the attributes below read it at once. So its log, its warnings and what
    `on_alarm` raises come at the next forward at the latest.

    Attributes:
        alarms: every `Alarm` so far: `.step`, `.kind`, `.severity`, `.heads`, `.text`, `.action`.
        layers: series name → module name.
        unmeasured: module name → why it is not watched.
        samples: how many steps were measured.
        spent: seconds spent on measuring.

    Raises:
        TypeError: `model` is not an nn.Module, or `log` is none of the above.
        ValueError: A number lies outside its range, or the model was compiled in place or is `nn.DataParallel` over
            several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        log: Any = None,
        heads: bool = False,
        *,
        metrics: Sequence[str] | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
        budget: float = 0.02,
        sequences: int | None = 1,
        group: Any = None,
        tensor_group: Any = None,
        pipeline_group: Any = None,
    ) -> None:
        check_arguments(model, every, budget, sequences, metrics, on_alarm)
        self.model, self.every, self.budget, self.sequences = model, every, budget, sequences
        self.heads, self.metrics, self.on_alarm = heads, metrics, on_alarm
        self.step = 0
        self.left_out = 0  # samples skipped because of the budget
        self._samples = 0
        self._spent = 0.0
        self._alarms: list[Alarm] = []
        self._layers: dict[str, str] = {}
        self._unmeasured: dict[str, str] = {}
        self._writer = make_writer(log)
        self._ranks = Ranks(group, tensor_group, pipeline_group)
        self._schedule, self._rules = Schedule(every), AlarmRules()
        self._orders = {name: at for at, (name, _) in enumerate(as_written(model).named_modules())}
        self._names: dict[str, str] = {}  # label -> series name
        self._started: float | None = None
        self._given_step: int | None = None
        self._missed = 0  # consecutive steps without a forward
        self._sampled_step: int | None = None
        self._first_step_within_budget = 1  # the same on every rank
        self._pending: tuple[int, dict[LayerKey, Tensor]] | None = None  # a sample that waits for `end_step`
        self._running: TimedRecorder | None = None  # of the sample whose forward runs
        self._finished: TimedRecorder | None = None  # of the one whose forward is over, and whose numbers were not read
        self._interceptions = ForwardInterceptions()
        self._warned: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self.watch()

    def watch(self) -> None:
        """Watch the model (again, after `close`); the callbacks do it at the start of training."""
        if self._hooks:
            return
        _watching.add(self)
        self._hooks += [
            self.model.register_forward_pre_hook(Hook(self._before), prepend=True),
            self.model.register_forward_hook(Hook(self._after), always_call=True),
        ]

    def close(self) -> None:
        """Read the last sample, stop watching and remove the hooks."""
        self._end_sample()
        self._read_sample()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _watching.discard(self)

    @property
    def alarms(self) -> list[Alarm]:
        """Every `Alarm` so far."""
        self._read_sample()
        return self._alarms

    @property
    def layers(self) -> dict[str, str]:
        """Series name → module name."""
        self._read_sample()
        return self._layers

    @property
    def unmeasured(self) -> dict[str, str]:
        """Module name → why it is not watched."""
        self._read_sample()
        return self._unmeasured

    @property
    def samples(self) -> int:
        """How many steps were measured."""
        self._read_sample()
        return self._samples

    @property
    def spent(self) -> float:
        """Seconds spent on measuring."""
        self._read_sample()
        return self._spent

    def __repr__(self) -> str:
        samples = self._samples + (self._finished is not None)  # without a wait for the one that was not read
        return (
            f"Monitor({type(as_written(self.model)).__name__}, every={self.every}): {samples} samples up to step "
            f"{self.step}, layers watched: {len(self._layers)}, not watched: {len(self._unmeasured)}, "
            f"alarms: {len(self._alarms)}"
        )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def trainer_callback(self) -> Any:
        """A callback for `transformers.Trainer(callbacks=[…])`; steps are then the trainer's."""
        from regard.health.watching.callbacks import trainer_callback

        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A callback for `lightning.Trainer(callbacks=[…])`: its steps, and its loggers where `log` is None."""
        from regard.health.watching.callbacks import lightning_callback

        return lightning_callback(self)

    def use_loggers(self, loggers: Sequence[Any]) -> None:
        """Log to these too, if `log` is None; the Lightning callback calls it."""
        if type(self._writer) is Writer and loggers:
            self._writer = Several([make_writer(logger) for logger in loggers])

    def at_step(self, step: int) -> None:
        """Set the number of the next step; forwards are not counted from then on. The callbacks call it."""
        self._given_step = step
        self._missed += 1  # reset by the next forward
        if self._missed > MISSED:
            self._warn_once(
                "missed",
                f"Monitor saw {MISSED} steps without a forward of the model in training mode, so nothing is watched. "
                "Pass it the module that a step calls (with Lightning, the one that training_step calls).",
            )

    def end_step(self) -> None:
        """Reduce the sample of this step over the ranks, where that waits for the end of the step (pipelines)."""
        self._read_sample()
        if self._pending is not None:
            (step, tables), self._pending = self._pending, None
            self._finish(step, tables)

    def _before(self, module: nn.Module, inputs: tuple) -> None:
        if module is not self.model:  # a copy, which has its hooks
            return
        self._end_sample()
        self._read_sample()  # while a GPU is at work on the step before
        if not module.training:
            return
        now = time.perf_counter()
        self._started = now if self._started is None else self._started
        self._missed = 0
        self.step = step = self.step + 1 if self._given_step is None else self._given_step
        if step == self._sampled_step or not self._schedule.is_due(step):
            return
        self._sampled_step = step
        self._schedule.take(step)
        if self._ranks.is_distributed():  # a function of the step, so that all ranks take the same samples
            within = step >= self._first_step_within_budget
        else:
            within = self._spent <= self.budget * max(now - self._started, LEAST_SECONDS)
        if not within:
            self._skip()
            return
        if runs_compiled():
            self._warn_once(
                "compiled", "The model runs compiled, so nothing is watched. Pass Monitor what torch.compile returned."
            )
            return
        make = TimedRecorder if self.metrics is None else MaxLogitRecorder
        self._running = recorder = make(sequences=self.sequences)
        self._interceptions.open(module, recorder)
        recorder.step, recorder.seconds = step, time.perf_counter() - now

    def _skip(self) -> None:
        self.left_out += 1
        due = self._samples + self.left_out
        if self.left_out >= SKIPPED and self.left_out > SKIPPED_SHARE * due:
            self._warn_once(
                "budget",
                f"Monitor skipped {self.left_out} of {due} samples to stay within budget={self.budget:g}: measuring "
                f"took {self._spent:.1f} s so far. What happens in skipped steps is not seen, and warnings of slow "
                "trends need 10 samples. Raise `budget` or `every`.",
            )

    def _end_sample(self) -> None:
        """Close a sample whose forward was aborted by KeyboardInterrupt; torch runs no hooks then."""
        self._interceptions.close(succeeded=False)
        self._running = None

    def _after(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        if module is not self.model:
            return
        finished, recorder, self._running = time.perf_counter(), self._running, None
        has_raised = output is None and sys.exc_info()[1] is not None
        self._interceptions.close(succeeded=not has_raised)
        if recorder is None or has_raised:
            return
        recorder.seconds += time.perf_counter() - finished
        recorder.end_forward()
        self._finished = recorder
        if self._ranks.is_distributed() or not recorder.is_on_gpu:
            self._read_sample()

    def _read_sample(self) -> None:
        """Reads the sample that a forward has left, logs it and raises alarms.

        A GPU is still at work when its forward returns. Alone, a process reads the sample before the next forward or
        when it is asked for it, so as not to wait; over ranks at once, because all of them have to.
        """
        if self._finished is None:
            return
        recorder, self._finished = self._finished, None
        began = time.perf_counter()
        recorder.finish_batch()
        tables = self._make_tables(recorder)
        try:
            if self._ranks.pipeline_group is None:
                self._finish(recorder.step, tables)
            else:
                self._pending = recorder.step, tables
        finally:  # `on_alarm` may raise
            if self._samples:  # the first one compiles kernels, which does not count
                self._spent += recorder.count_seconds() + time.perf_counter() - began
            self._samples += 1

    def _make_tables(self, recorder: TimedRecorder) -> dict[LayerKey, Tensor]:
        """Returns the table of each layer that this rank ran, and notes which could not be measured."""
        layers = merge_uses(recorder.layers.values())
        tables: dict[int, Tensor] = {}
        for layer in layers:
            is_measured = recorder.has_measured(layer)
            if not is_measured and not layer.not_finite:
                self._mark_unmeasured(layer, layer.reason or "it was not reached")
                continue
            tables[layer.index] = table = empty_table(layer.heads)
            table[layer.not_finite, AT["not_finite"]] = 1.0
            if layer.name in recorder.bounded:
                table[:, AT["bounded"]] = 1.0
            if is_measured:
                recorder.fill(layer, table)
                if not bool(table[:, AT["rows"]].any()) and any(layer.empty_rows):
                    self._mark_unmeasured(layer, SEES_NOTHING)
        recorder.mark_flags(layers, tables)
        if not layers and not self._samples:
            self._warn_once("unmeasured", "No attention call was seen in the model's forward, so nothing is watched.")
        return {
            self._ranks.key(self._orders.get(layer.name, 0), layer.label, layer.heads): tables[layer.index]
            for layer in layers
            if layer.index in tables
        }

    def _mark_unmeasured(self, layer: Layer, reason: str) -> None:
        self._unmeasured[layer.label] = reason
        self._warn_once(f"unmeasured {layer.label}", f"{layer.label}: not watched: {reason}")

    def _finish(self, step: int, tables: dict[LayerKey, Tensor]) -> None:
        """Reduces a sample over the ranks, raises alarms, and writes on the first rank."""
        from regard.health.qk_clip.max_logits import is_clipped

        if missing := self._ranks.find_missing():
            self._warn_once(
                "ranks",
                f"Monitor was not made on ranks {', '.join(map(str, missing[:8]))}, so it watches this rank alone. "
                "Make it on every rank; only the first one writes.",
            )
        elapsed = 0.0 if self._started is None else time.perf_counter() - self._started
        layers = self._ranks.gather(tables, self._spent, elapsed)
        self._first_step_within_budget = self._ranks.first_step_within(self.budget, step, LEAST_SECONDS)
        if any(layer.label not in self._names for layer in layers):
            self._names = series_names([layer.label for layer in layers])
            self._layers = {series: label for label, series in self._names.items()}
        rows, flags = head_rows(layers, self._names, step), flags_of(layers)
        new = self._rules.add(step, rows, flags, is_clipped(self.model))
        self._schedule.look_closer(step, self._rules.is_suspicious)
        self._alarms += new
        if self._ranks.is_first():
            scalars = scalars_of(layers, self._names)
            if self.metrics is not None:
                scalars = {name: value for name, value in scalars.items() if name.endswith("max_logit")}
            serious = sum(alarm.severity != "note" for alarm in self._alarms)
            self._log(step, scalars | {"attention/alarms": serious}, self._select(rows, flags), new)
            for alarm in new:
                if self.on_alarm is not None:
                    self.on_alarm(alarm)
                if alarm.severity != "note":
                    _warn(str(alarm))

    def _select(self, rows: list[dict], flags: dict[str, dict]) -> list[dict]:
        """Returns the heads whose own numbers are logged: all on request, else some of those in trouble."""
        if self.heads:
            return rows
        harmless = ("positional", "diffuse", "bounded")
        places = {place for kind, found in flags.items() if kind not in harmless for place in found}
        return [row for row in rows if (row["layer"], row["head"]) in places][:IN_TROUBLE]

    def _log(self, step: int, scalars: dict[str, float], rows: list[dict], alarms: list[Alarm]) -> None:
        try:
            self._writer.write(step, scalars, rows)
            for alarm in alarms:
                self._writer.write_alarm(alarm.to_json())
        except Exception as error:  # a failing log must not stop training
            self._warn_once("log", f"The monitor's log failed at step {step}, and rows are lost: {error!r}")

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            _warn(text)


def _warn(text: str) -> None:
    """Warns at the line that ran the model."""
    warnings.warn(text, AttentionWarning, stacklevel=find_caller()[1] + 1)


_watching: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _read_last_samples() -> None:
    """Reads what a loop that ended without `close` has left: the step before a crash is the one to know about."""
    for monitor in list(_watching):
        monitor._read_sample()
