"""`Monitor`: measure attention during training on a sample of steps, log scalars, report incidents.

What is an incident is decided in `watching/symptoms.py` and `watching/incidents.py`.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.health.capture.interception import as_written, find_caller
from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.measure.heads import SEES_NOTHING
from regard.health.measure.recorder import Layer, merge_uses
from regard.health.measure.side_stream import HostCopies
from regard.health.watching.bands import LossBand
from regard.health.watching.black_box import BlackBox, find_tokens
from regard.health.watching.hooks import ForwardInterceptions, Hook
from regard.health.watching.incidents import DEAD, LARGE, LOSSES, NOT_FINITE, Alarm, Incident, Incidents
from regard.health.watching.pulse import Pulse
from regard.health.watching.ranks import Joined, Ranks
from regard.health.watching.sample import AT, LayerKey, empty_table, flags_of, head_rows, scalars_of, series_names
from regard.health.watching.schedule import Schedule
from regard.health.watching.symptoms import Symptom
from regard.health.watching.taps import has_compiled_parts
from regard.health.watching.timed_recorder import MaxLogitRecorder, TimedRecorder
from regard.health.watching.validation import check_arguments
from regard.health.watching.writers import Several, Writer, make_writer

MISSED = 3  # consecutive steps without a forward before a warning
SKIPPED, SKIPPED_SHARE = 20, 0.75  # samples that the budget skipped, and their share, before a warning
LEAST_SECONDS = 600.0  # the budget is that of a training of ten minutes at least
IN_TROUBLE = 8  # heads whose own numbers are logged because a finding has them
SHIFT = math.log(
    1.25
)  # change of the norms of q and k, or five times that of logits, from which on attention has moved
PATIENCE = 8  # steps that a loss outside its band waits for a sample of attention
EXPLAINS = (LARGE, NOT_FINITE, DEAD)  # causes that explain a jump of the loss
NOWHERE = ("", -1)  # the place of what no head has


class AttentionWarning(UserWarning):
    """Warns that a head is unhealthy or about to be, or that something is not watched."""


class Monitor:
    """Measures attention on a sample of training steps, logs scalars per layer and over the model, reports incidents.

    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True, dropout=0.0)
    >>> rows = []
    >>> monitor = regard.Monitor(layer, every=2, log=rows.append)
    >>> for step in range(3):
    ...     loss = layer(torch.randn(2, 8, 32)).square().mean()
    >>> monitor.close()
    >>> [row["step"] for row in rows], 0.0 < rows[0]["attention/entropy_ratio_min"] <= 1.0
    ([1, 3], True)
    >>> monitor
    Monitor(TransformerEncoderLayer, every=2): 2 samples up to step 3, layers watched: 1, not watched: 0, incidents: 0
    >>> monitor.incidents
    []

    At every step, at no cost that can be measured, it looks at a few rows of each attention call, at the output, and at
    the loss that `step(loss=…)` is given; NaN, a logit beyond 100 and a loss that leaves its band draw the next sample
    closer.

    Args:
        model: the model in training. Each forward in training mode is a step, unless `step` is called.
        every: measure one step in this many; from 8 on the start is denser (gaps of 1, 2, 4, … steps, ten of each).
        log: where the numbers go: a path (JSONL), a TensorBoard writer, a Weights & Biases run, MLflow, a Lightning
            logger, a `transformers.Trainer`, an `accelerate.Accelerator`, an object with `log`, a function that takes a
            dict, or None. A number that a sample lacks (an entropy ratio if all rows see one key) is NaN, in a file
            null, and no point in a series.
        heads: True to log every head as well. Otherwise heads are logged only while a finding has them, 8 at most.
        metrics: None for all, or ("max_logit",) to measure the largest logit alone, which is cheap enough for every=1.
        on_alarm: a function that is called with each `Alarm`, on every rank at the same step.
        budget: the fraction of the training time that measuring may take, of ten minutes at least; a sample that would
            exceed it is skipped. Warns once if most samples are skipped.
        sequences: how many sequences of a batch are measured; None for all.
        group: the process group whose ranks are joined into one log, of which the first writes, or a DeviceMesh with
            named dimensions, of which "tp" and "pp" are read as the next two; None is all ranks. A monitor has to be
            made on each of them.
        tensor_group: the ranks that hold different heads of the same layers (tensor parallel).
        pipeline_group: the ranks that hold different layers. Call `step` after each step then; the callbacks do it.
        on_failure: what to do where a rank sends no sample for `timeout` seconds: "alone" goes on without it, "stop"
            stops watching. Training never waits for it: samples travel through the group's key-value store.
        timeout: see on_failure.
        black_box: the file that the last samples of the worst rows are written to on an incident, for `regard replay`.
        text: True to write tokens as text too, by `tokenizer`; otherwise their ids alone.
        tokenizer: an object with `decode`.

    On a GPU, in one process, a sample is read when the next forward begins, because the GPU is still at work when its
    own forward ends; `step`, `close` and the attributes below read it at once. Over ranks it is joined one or two steps
    later. An exception of `on_alarm` is shown as a warning: nothing here ends a training step, except that ranks which
    hold other heads without `tensor_group` are refused in the first steps.

    What torch.compile made is watched inside its graphs: the largest logits, without a graph break, if `metrics` is
    ("max_logit",) or the compiled part runs within `model`. Given what torch.compile returned and all metrics, sampled
    steps run as written.

    Attributes:
        incidents: every `Incident` so far: `.cause`, `.severity`, `.opened`, `.resolved` (a step or None), `.heads`,
            `.text`, `.action`, `.code`.
        alarms: every change of one: `.step`, `.kind`, `.severity`, `.heads`, `.text`, `.action`, `.event`.
        layers: series name → module name.
        unmeasured: module name → why it is not watched.
        samples: how many steps were measured.
        steps: how many steps it has seen.
        spent: seconds spent on measuring.

    Raises:
        TypeError: `model` is not an nn.Module, or `log` is none of the above.
        ValueError: A number lies outside its range, or the model is `nn.DataParallel` over several devices.
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
        on_failure: str = "alone",
        timeout: float = 60.0,
        black_box: str | Path | None = None,
        text: bool = False,
        tokenizer: Any = None,
    ) -> None:
        check_arguments(model, every, budget, sequences, metrics, on_alarm, on_failure, timeout, text, tokenizer)
        self.model, self.every, self.budget, self.sequences = model, every, budget, sequences
        self.heads, self.metrics, self.on_alarm, self.on_failure = heads, metrics, on_alarm, on_failure
        self.steps = 0
        self.left_out = 0  # samples skipped because of the budget
        self.black_box = BlackBox(black_box, tokenizer if text else None)
        self._samples = 0
        self._spent = 0.0
        self._alarms: list[Alarm] = []
        self._layers: dict[str, str] = {}
        self._unmeasured: dict[str, str] = {}
        self._writer = make_writer(log)
        self._ranks = Ranks(model, group, tensor_group, pipeline_group, timeout)
        self._schedule, self._incidents = Schedule(every), Incidents()
        self._loss, self._gradient = LossBand(), LossBand(spreads=2.0, share=0.3, rises=False)
        self._largest = LossBand(spreads=2.0, share=0.1, rises=False)  # of the pulse's largest logits
        self._sudden: list[Symptom] = []  # of the pulse, that were not told
        self._given = HostCopies()  # losses and norms that the user passed in
        self._history: list[tuple[int, float, float]] = []  # step, norm of q and k, largest logit of each sample
        self._orders = {name: at for at, (name, _) in enumerate(as_written(model).named_modules())}
        self._names: dict[str, str] = {}  # label -> series name
        self._started: float | None = None
        self._given_step: int | None = None
        self._began = 0  # the step before the first one that `step` ends
        self._missed = 0  # consecutive steps without a forward
        self._saw_forward = False  # in this step
        self._sampled_step = 0  # the last one
        self._first_step_within_budget = 1  # the same on every rank
        self._pending: tuple[int, dict[LayerKey, Tensor]] | None = None  # a sample that waits for the end of its step
        self._running: TimedRecorder | None = None  # of the sample whose forward runs
        self._finished: TimedRecorder | None = None  # of the one whose forward is over, and whose numbers were not read
        self._interceptions = ForwardInterceptions()
        self._pulse: Pulse | None = None
        self._last_finite = 0  # the last step that was
        self._warned: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self.watch()

    def watch(self) -> None:
        """Watch the model (again, after `close`); the callbacks do it at the start of training."""
        if self._hooks:
            return
        _watching.add(self)
        self._pulse = Pulse(self.model)
        self._hooks += [
            self.model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True),
            self.model.register_forward_hook(Hook(self._after), always_call=True),
        ]

    def close(self) -> None:
        """Read the last sample, stop watching and remove the hooks."""
        if not self._hooks:
            return
        self._guarded(self._end_sample)
        self._guarded(self._read_sample)
        self._guarded(self._tell_pending)
        self._guarded(self._read_ranks, True)
        if self._pulse is not None:
            if not self.steps and self._pulse.has_seen():
                self._warn_once(
                    "steps", "The model ran compiled and Monitor was told of no step, so nothing was logged. Call "
                    "monitor.step(loss=…) after each step, or pass Monitor what torch.compile returned.",
                )  # fmt: skip
            self._pulse.close()
            self._pulse = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _watching.discard(self)

    @property
    def incidents(self) -> list[Incident]:
        """Every `Incident` so far."""
        self._read_sample()
        return self._incidents.all

    @property
    def alarms(self) -> list[Alarm]:
        """Every `Alarm` so far: each time an incident opened, reopened, became graver or wider."""
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
            f"{self.steps}, layers watched: {len(self._layers)}, not watched: {len(self._unmeasured)}, "
            f"incidents: {len(self._incidents.all)}"
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

    def step(self, loss: Any = None, grad_norm: Any = None) -> None:
        """Ends a step: call it after `optimizer.step()`, with the loss as a number or a tensor, which is read later.

        Forwards are counted no more from then on: with accumulation, several make a step.
        """
        number = self._given_step if self._given_step is not None else self._began + 1
        self._guarded(self._end_compiled_step, number)
        self.observe(loss, grad_norm)
        self.end_step()
        self.at_step(number + 1)

    def observe(self, loss: Any = None, grad_norm: Any = None) -> None:
        """Takes the loss and the gradient's norm of the step that ends; the callbacks pass what the trainer logs."""
        for band, value in ((self._loss, loss), (self._gradient, grad_norm)):
            if isinstance(value, Tensor) and value.numel() == 1:
                self._given.add(value.detach().reshape(1).float(), self._receiver(band, self.steps))
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                band.add(self.steps, float(value))
        self._given.start()

    def _receiver(self, band: LossBand, step: int) -> Callable[[Tensor], None]:
        return lambda value: band.add(step, float(value))

    def at_step(self, step: int) -> None:
        """Set the number of the next step; forwards are not counted from then on. The callbacks call it."""
        if self._given_step is not None and not self._saw_forward:
            self._guarded(self._end_compiled_step, self._given_step)
        if step < (self._given_step or 0):  # a second training
            self._sampled_step = 0
        self._given_step, self._saw_forward = step, False
        self._missed += 1  # reset by the next forward
        if self._missed > MISSED:
            self._warn_once(
                "missed",
                f"Monitor saw {MISSED} steps without a forward of the model in training mode, so nothing is watched. "
                "Pass it the module that a step calls (with Lightning, the one that training_step calls).",
            )

    def end_step(self) -> None:
        """Ends a step as far as ranks and compiled graphs are concerned; `step` and the callbacks call it."""
        if self._given_step is not None:
            self._guarded(self._end_compiled_step, self._given_step)
        self._guarded(self._read_sample)
        self._guarded(self._tell_pending)
        self._guarded(self._read_ranks)

    def record(self, path: str | Path) -> None:
        """Writes the black box, for `regard replay`."""
        self._read_sample()
        self.black_box.write(path, self._incidents.all)

    def state_dict(self) -> dict[str, Any]:
        """Returns steps, incidents and what the rules know of every head, as plain values for `load_state_dict`."""
        self._read_sample()
        return {
            "steps": self.steps, "samples": self._samples, "schedule": self._schedule.state(),
            "incidents": self._incidents.state(), "loss": self._loss.state(), "gradient": self._gradient.state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned: steps go on, and the dense start is not repeated."""
        self.steps, self._samples = int(state["steps"]), int(state["samples"])
        self._schedule.load(state["schedule"])
        self._incidents.load(state["incidents"])
        self._loss.load(state["loss"])
        self._gradient.load(state["gradient"])
        self._last_finite = self._began = self.steps

    def _guarded(self, call: Callable, *arguments: Any) -> None:
        """Calls what belongs to us within a step; an error is said once and never ends the step."""
        try:
            call(*arguments)
        except (AttentionWarning, RankError):
            raise
        except Exception as error:
            self._interceptions.close(succeeded=False)
            self._warn_once(f"failed {type(error).__name__}", f"Monitor failed at step {self.steps}: {error!r}")

    def _before(self, module: nn.Module, inputs: tuple, named: dict) -> None:
        if module is self.model:  # else a copy, which has its hooks
            self._guarded(self._begin_forward, module, inputs, named)

    def _begin_forward(self, module: nn.Module, inputs: tuple, named: dict) -> None:
        self._end_sample()
        self._read_sample()  # while a GPU is at work on the step before
        if not module.training:
            return
        now = time.perf_counter()
        self._started = now if self._started is None else self._started
        self._missed, self._saw_forward = 0, True
        self.steps = step = self.steps + 1 if self._given_step is None else self._given_step
        if self._pending is None:
            self._read_ranks()
        self._read_pulse(step)
        if step <= self._sampled_step or not (self._schedule.is_due(step) or self._ranks.is_asked(step)):
            return
        self._sampled_step = step
        self._schedule.take(step)
        if not self._is_within_budget(step, now):
            self._skip()
            return
        if self.metrics is not None and has_compiled_parts(module):
            return  # read in the graph: see `_after`
        make = TimedRecorder if self.metrics is None else MaxLogitRecorder
        self._running = recorder = make(sequences=self.sequences)
        recorder.tokens = find_tokens(inputs, named)
        self._ranks.note_inputs((*inputs, *named.values()))
        self._interceptions.open(module, recorder)
        recorder.step, recorder.seconds = step, time.perf_counter() - now

    def _is_within_budget(self, step: int, now: float) -> bool:
        if self._ranks.is_distributed():  # a function of the step, so that all ranks take the same samples
            return step >= self._first_step_within_budget
        return self._spent <= self.budget * max(now - (self._started or now), LEAST_SECONDS)

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
        if module is self.model:
            has_raised = output is None and sys.exc_info()[1] is not None
            self._guarded(self._end_forward, module, output, has_raised)

    def _end_forward(self, module: nn.Module, output: Any, has_raised: bool) -> None:
        finished, recorder, self._running = time.perf_counter(), self._running, None
        self._interceptions.close(succeeded=not has_raised)
        if has_raised:
            return  # over ranks, a later sample tells the others that there is none of this step
        if module.training and self._pulse is not None:
            self._pulse.end_forward(self.steps, output)
            if recorder is None and self._sampled_step == self.steps and has_compiled_parts(module):
                self._sample_taps(self.steps)
        if recorder is None:
            return
        recorder.seconds += time.perf_counter() - finished
        recorder.end_forward()
        self._finished = recorder
        if self._ranks.is_distributed() or not recorder.is_on_gpu:
            self._read_sample()

    def _end_compiled_step(self, step: int) -> None:
        """Ends a step whose forward no hook saw, because the model runs in a graph: its taps have."""
        if self._pulse is None or self._saw_forward or not self._pulse.has_seen():
            return
        self.steps, self._saw_forward = step, True
        self._started = self._started or time.perf_counter()
        self._read_pulse(step)
        self._pulse.end_forward(step, None)
        if self.metrics is None:
            self._warn_once(
                "compiled",
                "The model runs compiled, so of its attention the largest logits alone are watched. Pass Monitor what "
                'torch.compile returned to watch all of it, or metrics=("max_logit",).',
            )
        if step > self._sampled_step and (self._schedule.is_due(step) or self._ranks.is_asked(step)):
            self._sampled_step = step
            self._schedule.take(step)
            self._sample_taps(step)

    def _sample_taps(self, step: int) -> None:
        """Makes a sample of the largest logits that compiled graphs have written."""
        assert self._pulse is not None
        tables = {}
        for label, held in self._pulse.layers.items():
            largest = held[1:].double().cpu()
            if bool((largest == -math.inf).all()):
                continue  # it did not run
            table = empty_table(len(largest))
            table[:, AT["rows"]] = (largest != -math.inf).double()
            table[:, AT["max_logit"]] = largest
            table[:, AT["exploding logits"]] = torch.where(largest > LOGIT_LIMIT, largest, math.nan)
            table[:, AT["not_finite"]] = (largest.isnan() | largest.isposinf()).double()
            tables[self._ranks.key(self._orders.get(label, 0), label, len(largest))] = table
        if tables or self._ranks.is_distributed():
            self._samples += 1
            self._tell(step, tables)

    def _read_pulse(self, step: int) -> None:
        """Reads what the last step left, and draws the next samples closer where it looks wrong."""
        self._given.finish()
        trouble = self._loss.is_suspicious or self._gradient.is_suspicious
        if self._pulse is not None and self._pulse.read():
            self._missed = 0
            if self._pulse.is_finite:
                self._last_finite = self._pulse.step or 0
            self._largest.add(step - 1, self._pulse.largest)
            self._sudden += self._pulse.sudden
            trouble |= bool(self._sudden) or (self._largest.is_suspicious and self._pulse.largest > LOGIT_LIMIT / 4)
            known = self._incidents.find_open(NOT_FINITE)
            trouble |= not self._pulse.is_finite and not known
            trouble |= self._pulse.largest > LOGIT_LIMIT and not self._incidents.find_open()
        if trouble:
            if self._ranks.is_distributed():
                self._ranks.ask(step + 1)
            else:
                self._schedule.look_closer(step - 1, True)
        if not self._ranks.is_distributed():
            self._judge_loss(step, self._describe_loss())

    def _describe_loss(self) -> dict[str, Any]:
        """Returns what this rank has seen since the last call of its loss and of sudden changes, as plain values."""
        band, output_lost = self._loss, self._pulse is not None and not self._pulse.is_finite
        is_lost = math.isinf(band.last) or (band.outside > 0 and math.isnan(band.last))
        sudden, self._sudden = self._sudden, []
        return {
            "lost": "the loss" if is_lost else "an output or a logit" if output_lost else "", "last": band.last,
            "middle": band.middle, "jumped": band.has_jumped, "leapt": band.has_leapt, "first": band.first_outside,
            "outside": band.outside, "sudden": sudden,
        }  # fmt: skip

    def _judge_loss(self, step: int, loss: Mapping[str, Any]) -> None:
        """Opens an incident where numbers of every step have jumped or are lost; resolves it where they are back."""
        at, sudden = step - 1, loss["sudden"]
        found = [Symptom(kind, severity, tuple(place), *rest) for kind, severity, place, *rest in sudden]
        self._incidents.is_lost = bool(loss["lost"])
        is_finite = math.isfinite(loss["last"])
        if loss["lost"] and not self._incidents.find_open(NOT_FINITE):
            text = f"{loss['lost']} is NaN or infinite; the last finite step was {self._last_finite}"
            found.append(Symptom("not finite", "critical", NOWHERE, 0.0, text))
        elif loss["jumped"] and is_finite and not found and not self._incidents.find_open(*LOSSES, *EXPLAINS):
            found += self._explain_loss(loss, loss["first"] or step)
        alarms = self._incidents.tell(at, found)
        if not loss["outside"] and is_finite:
            alarms += [self._incidents.close(one, at, "the loss is back in its band")
                       for one in self._incidents.find_open(*LOSSES)]  # fmt: skip
        self._announce(at, alarms)

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

    def _read_sample(self) -> None:
        """Reads the sample that a forward has left, logs it and reports incidents.

        A GPU is still at work when its forward returns. Alone, a process reads the sample before the next forward or
        when it is asked for it, so as not to wait; over ranks at once, to post it.
        """
        if self._finished is None:
            return
        recorder, self._finished = self._finished, None
        began = time.perf_counter()
        recorder.finish_batch()
        tables = self._make_tables(recorder)
        self.black_box.add(recorder.step, recorder.worst_rows(), recorder.tokens)
        if self._ranks.groups.pipeline is None:
            self._tell(recorder.step, tables)
        else:
            self._pending = recorder.step, tables
        if self._samples:  # the first one compiles kernels, which does not count
            self._spent += recorder.count_seconds() + time.perf_counter() - began
        self._samples += 1

    def _tell_pending(self) -> None:
        if self._pending is not None:
            (step, tables), self._pending = self._pending, None
            self._tell(step, tables)

    def _tell(self, step: int, tables: dict[LayerKey, Tensor]) -> None:
        """Reports a sample, or posts it for the other ranks."""
        elapsed = 0.0 if self._started is None else time.perf_counter() - self._started
        if self._ranks.is_distributed():
            self._ranks.post(step, tables, self._spent, elapsed, self._describe_loss())
        else:
            self._finish(Joined(step, self._ranks.merge_own(tables), loss=self._describe_loss()))

    def _read_ranks(self, closing: bool = False) -> None:
        """Reports the samples that all ranks have posted."""
        if not self._ranks.is_distributed():
            return
        try:
            joined = self._ranks.read(self.steps, self.budget, LEAST_SECONDS, closing)
        except Exception as error:  # the store is gone: its process has ended
            self._ranks.alone, joined = f"{type(error).__name__}: {error}", []
        for one in joined:
            self._first_step_within_budget = one.first_step
            self._tell_of_ranks(one)
            self._finish(one)
            if one.loss:
                self._judge_loss(one.step + 1, one.loss)
        if self._ranks.alone and not closing:
            self._fail_rank(f"{self._ranks.alone}, so this rank is watched alone")

    def _tell_of_ranks(self, joined: Joined) -> None:
        kind, *pair = joined.refused.split(" ") if joined.refused else ("",)
        if kind == "heads":
            raise RankError(
                f"Monitor: ranks {pair[0]} and {pair[1]} are given the same and hold different weights of queries and "
                "keys. If these are different heads of the same layers, pass tensor_group=; if the ranks train models "
                "of their own, group="
            )
        if kind == "layers":
            self._ranks.alone = f"ranks {pair[0]} and {pair[1]} hold different layers (pass pipeline_group=)"
        if joined.absent and not self._ranks.alone:
            unmade = self._ranks.find_unmade(joined.absent)
            names = ", ".join(map(str, joined.absent[:8]))
            if unmade == joined.absent:
                text = f"Monitor was not made on ranks {names}, so they are not watched. Make it on every rank."
            else:
                text = (
                    f"rank {names} sent no sample of step {joined.step} for {self._ranks.timeout:g} s, so it is left "
                    "out: its data have ended, it runs other steps, or it has failed"
                )
            self._fail_rank(text)

    def _fail_rank(self, text: str) -> None:
        from torch import distributed

        text = text if text.startswith("Monitor") else f"Monitor on rank {distributed.get_rank()}: {text}"
        self._warn_once(f"ranks {text[:40]}", text)
        if self.on_failure == "stop":
            self.close()

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
            table[layer.not_finite, AT["not_finite"]] = 1.0 + recorder.is_input_lost(layer)
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

    def _finish(self, joined: Joined) -> None:
        """Reports incidents of a sample, the same on every rank, and writes on the first."""
        from regard.health.qk_clip.max_logits import is_clipped

        step, layers = joined.step, joined.layers
        if any(layer.label not in self._names for layer in layers):
            self._names = series_names([layer.label for layer in layers])
            self._layers = {series: label for label, series in self._names.items()}
        rows, flags = head_rows(layers, self._names, step), flags_of(layers)
        scalars = scalars_of(layers, self._names)
        norms = scalars.get("attention/q_norm", math.nan) + scalars.get("attention/k_norm", math.nan)
        self._history = [*self._history[-49:], (step, norms, scalars.get("attention/max_logit", math.nan))]
        alarms = self._incidents.add(step, rows, flags, is_clipped(self.model), bool(joined.loss.get("jumped")))
        self._schedule.look_closer(step, self._incidents.is_suspicious)
        if self.metrics is not None:
            scalars = {name: value for name, value in scalars.items() if name.endswith("max_logit")}
        if self._loss.last == self._loss.last:
            scalars["attention/loss"] = self._loss.last
        serious = sum(one.severity != "note" for one in self._incidents.find_open())
        if self._ranks.is_first():
            self._log(step, scalars | {"attention/alarms": serious}, self._select(rows, flags), [])
        self._announce(step, alarms)

    def _announce(self, step: int, alarms: Iterable[Alarm]) -> None:
        """Writes what changed on the first rank, and calls `on_alarm` on all."""
        opened = [alarm for alarm in alarms if alarm.event != "resolved"]
        self._alarms += opened
        if alarms and self._ranks.is_first():
            self._log(step, None, [], list(alarms))
        if opened and self.black_box.path is not None and self._ranks.is_first():
            self._guarded(self.black_box.write, self.black_box.path, self._incidents.all)
        for alarm in opened:
            if self.on_alarm is not None:
                try:
                    self.on_alarm(alarm)
                except Exception as error:
                    self._warn_once("on_alarm", f"on_alarm raised at step {alarm.step}: {error!r}")
            if alarm.severity != "note" and self._ranks.is_first():
                _warn(str(alarm))

    def _select(self, rows: list[dict], flags: Mapping[str, Mapping]) -> list[dict]:
        """Returns the heads whose own numbers are logged: all on request, else some of those in trouble."""
        if self.heads:
            return rows
        harmless = ("positional", "diffuse", "bounded")
        places = {place for kind, found in flags.items() if kind not in harmless for place in found}
        return [row for row in rows if (row["layer"], row["head"]) in places][:IN_TROUBLE]

    def _log(self, step: int, scalars: dict[str, float] | None, rows: list[dict], alarms: list[Alarm]) -> None:
        try:
            if scalars is not None:
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


class RankError(ValueError):
    """The ranks cannot be put together without a group."""


def _warn(text: str) -> None:
    """Warns at the line that ran the model."""
    warnings.warn(text, AttentionWarning, stacklevel=find_caller()[1] + 1)


_watching: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _read_last_samples() -> None:
    """Reads what a loop that ended without `close` has left: the step before a crash is the one to know about."""
    for monitor in list(_watching):
        monitor._guarded(monitor._read_sample)
