"""`Monitor`: measure attention during training on a sample of steps, log scalars, report incidents.

| in `watching/` | is decided |
| --- | --- |
| `sampling.py` | which forwards are measured, within which budget |
| `every_step.py`, `pulse.py`, `bands.py` | what is looked at in every step |
| `symptoms.py`, `incidents.py` | what is wrong, and what an incident is |
| `ranks.py`, `groups.py` | how samples of ranks become one |
| `telling.py`, `black_box.py` | what is written, and who is told |
"""

from __future__ import annotations

import atexit
import numbers
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import setitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.health.capture.forwards import as_written
from regard.health.capture.interception import check_model
from regard.health.measure.side_stream import HostCopies
from regard.health.watching import callbacks
from regard.health.watching.black_box import BlackBox
from regard.health.watching.every_step import NO_STEP, ONLY_LOGITS, EveryStep
from regard.health.watching.incidents import Alarm, Incident, Incidents
from regard.health.watching.ranks import GroupNeeded, Joined, Ranks
from regard.health.watching.sampling import LEAST_SECONDS, Hook, Sampler, Tables
from regard.health.watching.taps import has_compiled_parts
from regard.health.watching.telling import AttentionWarning, Teller

METRICS = ("max_logit",)  # what `metrics` may name


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
        model: the model in training. Each forward in training mode, with gradients, is a step, unless `step` is called.
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

    On a GPU a sample is read when the next forward begins, or by `step`, `close` and the properties below; over ranks
    it is joined one or two steps later. An exception of `on_alarm` is shown as a warning: nothing here ends a training
    step, except that ranks which hold other heads without `tensor_group` are refused in the first steps.

    What torch.compile made is watched inside its graphs: the largest logits, without a graph break, if `metrics` is
    ("max_logit",) or the compiled part runs within `model`. Given what torch.compile returned and all metrics, sampled
    steps run as written.

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
        check_model(model)
        for is_right, wanted, given in (
            (_is_count(every), "every must be an int ≥ 1", every),
            (_is_number(budget) and 0.0 < budget <= 1.0, "budget must be a number in (0, 1]", budget),
            (sequences is None or _is_count(sequences), "sequences must be an int ≥ 1, or None for all", sequences),
            (metrics is None or tuple(metrics) == METRICS, f"metrics must be None for all, or {METRICS}", metrics),
            (on_failure in ("alone", "stop"), 'on_failure must be "alone" or "stop"', on_failure),
            (_is_number(timeout) and timeout > 0, "timeout must be a number of seconds > 0", timeout),
        ):
            if not is_right:
                raise ValueError(f"{wanted}, got {given!r}")
        if text and not callable(getattr(tokenizer, "decode", None)):
            raise ValueError("text=True needs tokenizer=, an object with decode")
        if on_alarm is not None and not callable(on_alarm):
            raise TypeError(f"on_alarm must be a function that takes an Alarm, got {type(on_alarm).__name__}")
        self.model, self.every, self.metrics, self.on_failure = model, every, metrics, on_failure
        self.steps = 0  # that it has seen
        self.black_box = BlackBox(black_box, tokenizer if text else None)
        self._incidents = Incidents()
        self._every_step = EveryStep(self._incidents)
        self._teller = Teller(log, heads, metrics, on_alarm, self.black_box, self._incidents)
        self._ranks = Ranks(model, group, tensor_group, pipeline_group, timeout)
        self._sampler = Sampler(model, every, budget, sequences, metrics, self._ranks.key, self._teller.warn_once)
        self._tapped: tuple[int, dict[str, Tensor], HostCopies] | None = None  # a sample that is being fetched
        self._given_step = None if self._ranks.groups.pipeline is None else 1  # a pipeline's step has several forwards
        self._began = 0  # the step before the first one that `step` ends
        self._saw_forward = False  # in this step
        self._first_step_within_budget = 1  # the same on every rank
        self._hooks: list[RemovableHandle] = []
        self.watch()

    def watch(self) -> None:
        """Watch the model (again, after `close`); the callbacks do it at the start of training."""
        if self._hooks:
            return
        _watching.add(self)
        self._every_step.start(self.model)
        self._hooks += [
            self.model.register_forward_pre_hook(
                Hook(partial(self._guarded, self._begin_forward)), prepend=True, with_kwargs=True
            ),
            self.model.register_forward_hook(Hook(partial(self._guarded, self._end_forward)), always_call=True),
        ]

    def close(self) -> None:
        """Read the last sample, stop watching and remove the hooks; over ranks it waits five seconds at most."""
        self._close(waits=True)

    def _close(self, waits: bool) -> None:
        if not self._hooks:
            return
        self._sampler.abort()
        self._guarded(self._read_taps)
        self._guarded(self._read_sample, True)
        self._guarded(self._read_ranks, True, waits)
        if not self.steps and self._every_step.has_seen_graphs():
            self._teller.warn_once("steps", NO_STEP)
        self._every_step.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _watching.discard(self)

    @property
    def incidents(self) -> list[Incident]:
        """Every `Incident` so far, with its cause, severity, steps, heads, text and action."""
        self._read_sample()
        return self._incidents.all

    @property
    def alarms(self) -> list[Alarm]:
        """Every `Alarm` so far: each time an incident opened, reopened, became graver or wider (`.event`)."""
        self._read_sample()
        return self._teller.alarms

    @property
    def layers(self) -> dict[str, str]:
        """Series name → module name."""
        self._read_sample()
        return self._teller.layers

    @property
    def unmeasured(self) -> dict[str, str]:
        """Module name → why it is not watched."""
        self._read_sample()
        return self._sampler.unmeasured

    @property
    def samples(self) -> int:
        """How many steps were measured."""
        self._read_sample()
        return self._sampler.samples

    @property
    def left_out(self) -> int:
        """How many samples were skipped because of the budget."""
        return self._sampler.left_out

    @property
    def spent(self) -> float:
        """Seconds spent on measuring."""
        self._read_sample()
        return self._sampler.spent

    def __repr__(self) -> str:
        samples = self._sampler.samples + (self._sampler.finished is not None)  # no wait for one that was not read
        return (
            f"Monitor({type(as_written(self.model)).__name__}, every={self.every}): {samples} samples up to step "
            f"{self.steps}, layers watched: {len(self._teller.layers)}, not watched: {len(self._sampler.unmeasured)}, "
            f"incidents: {len(self._incidents.all)}"
        )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._close(waits=kind is None)  # after an error, of a rank that is gone too, nobody is waited for

    def trainer_callback(self) -> Any:
        """A callback for `transformers.Trainer(callbacks=[…])`; steps are then the trainer's."""
        return callbacks.trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A callback for `lightning.Trainer(callbacks=[…])`: its steps, and its loggers where `log` is None."""
        return callbacks.lightning_callback(self)

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
        self._guarded(self._observe, "loss", loss)
        self._guarded(self._observe, "grad_norm", grad_norm)

    def at_step(self, step: int) -> None:
        """Set the number of the next step; forwards are not counted from then on. The callbacks call it."""
        if self._given_step is not None:
            self._guarded(self._end_compiled_step, self._given_step)
        if step < (self._given_step or 0):  # a second training
            self._sampler.last = 0
        self._given_step, self._saw_forward = step, False
        self._sampler.note_step()

    def end_step(self) -> None:
        """Ends a step as far as ranks and compiled graphs are concerned; `step` and the callbacks call it."""
        if self._given_step is not None:
            self._guarded(self._end_compiled_step, self._given_step)
        self._guarded(self._read_sample, True)
        self._guarded(self._read_ranks)

    def record(self, path: str | Path) -> None:
        """Writes the black box, for `regard replay`."""
        self._read_sample()
        self.black_box.write(path, self._incidents.all)

    def state_dict(self) -> dict[str, Any]:
        """Returns steps, incidents and what the rules know of every head, as plain values for `load_state_dict`."""
        self._read_sample()
        return {
            "steps": self.steps, "samples": self._sampler.samples, "schedule": self._sampler.schedule.state(),
            "incidents": self._incidents.state(), **self._every_step.state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned: steps go on, and the dense start is not repeated."""
        self.steps, self._sampler.samples = int(state["steps"]), int(state["samples"])
        self._sampler.schedule.load(state["schedule"])
        self._incidents.load(state["incidents"])
        self._every_step.load(state, self.steps)
        self._began, self._given_step = self.steps, None if self._given_step is None else self.steps + 1

    def _guarded(self, call: Callable, *arguments: Any) -> None:
        """Calls what belongs to us within a step; an error is said once and never ends the step."""
        try:
            call(*arguments)
        except (AttentionWarning, GroupNeeded):
            raise
        except Exception as error:
            self._sampler.abort()
            self._teller.warn_once(f"failed {type(error).__name__}", f"Monitor failed at step {self.steps}: {error!r}")

    def _observe(self, name: str, value: Any) -> None:
        if wrong := self._every_step.observe(self.steps, name, value):
            self._teller.warn_once(name, wrong)

    def _begin_forward(self, module: nn.Module, inputs: tuple, named: dict) -> None:
        if module is not self.model:  # a copy, which has its hooks
            return
        self._sampler.abort()
        self._read_sample()  # while a GPU is at work on the step before
        if not (module.training and torch.is_grad_enabled()):
            return
        self._sampler.missed, self._saw_forward = 0, True
        self._every_step.begin_forward((*inputs, *named.values()))
        self.steps = step = self.steps + 1 if self._given_step is None else self._given_step
        if self._sampler.finished is None:  # else in the middle of a pipeline's step
            self._read_ranks()
        self._read_step_before(step)
        if self._sampler.is_due(step, self._ranks.is_asked):
            first = self._first_step_within_budget if self._ranks.is_distributed() else None
            if self._sampler.begin(step, inputs, named, first):
                self._ranks.note_inputs((*inputs, *named.values()))

    def _end_forward(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        if module is not self.model:
            return
        has_raised = output is None and sys.exc_info()[1] is not None
        is_read, pulse = self._sampler.end(has_raised), self._every_step.pulse
        if has_raised:
            return  # over ranks, a later sample tells the others that there is none of this step
        if module.training and torch.is_grad_enabled() and pulse is not None:
            pulse.end_forward(self.steps, output)
            if self._sampler.finished is None and self._sampler.last == self.steps and has_compiled_parts(module):
                self._sample_taps(self.steps, pulse.layers)
        if is_read or self._ranks.is_distributed():
            self._read_sample()

    def _end_compiled_step(self, step: int) -> None:
        """Ends a step whose forward no hook saw, because the model runs in a graph: its taps have."""
        pulse = self._every_step.pulse
        if pulse is None or self._saw_forward or not pulse.has_seen():
            return
        self.steps, self._saw_forward = step, True
        self._read_step_before(step)
        self._read_taps()
        pulse.end_forward(step, None)
        if self.metrics is None:
            self._teller.warn_once("compiled", ONLY_LOGITS)
        if self._sampler.is_due(step, self._ranks.is_asked):
            self._sample_taps(step, pulse.layers)

    def _sample_taps(self, step: int, held: Mapping[str, Tensor]) -> None:
        """Starts to fetch what the taps hold; a GPU's is read while the next step runs."""
        copies, found = HostCopies(), {}  # type: ignore[var-annotated]
        for name, one in held.items():
            copies.add(one, partial(setitem, found, name))
        copies.start()
        self._tapped = step, found, copies
        if not any(one.is_cuda for one in held.values()):
            self._read_taps()

    def _read_taps(self) -> None:
        if self._tapped is None:
            return
        (step, found, copies), self._tapped = self._tapped, None
        copies.finish()
        tables = self._sampler.read_taps(found)
        if tables or self._ranks.is_distributed():
            self._sampler.samples += 1
            self._join(step, tables)

    def _read_step_before(self, step: int) -> None:
        """Reads what the last step left, and draws the next samples closer where it looks wrong."""
        has_read, is_wrong = self._every_step.read(step)
        self._sampler.missed = 0 if has_read else self._sampler.missed
        if is_wrong and self._ranks.is_distributed():
            self._ranks.ask(step + 1)
        elif is_wrong:
            self._sampler.schedule.look_closer(step - 1, True)
        if not self._ranks.is_distributed():
            self._tell_loss(step - 1, self._every_step.describe())

    def _tell_loss(self, step: int, loss: Mapping[str, Any]) -> None:
        self._teller.tell_alarms(step, self._every_step.judge(step, loss), self._ranks.is_first())

    def _read_sample(self, at_end: bool = False) -> None:
        """Reads the sample that a forward has left and reports or posts it; a pipeline's at the end of the step."""
        if not at_end:
            self._read_taps()
        if at_end or self._ranks.groups.pipeline is None:
            sample = self._sampler.read(self.black_box)
            if sample is not None:
                self._join(*sample)

    def _join(self, step: int, tables: Tables) -> None:
        """Reports a sample, or posts it for the other ranks."""
        loss = self._every_step.describe()
        if self._ranks.is_distributed():
            self._ranks.post(step, tables, self._sampler.spent, self._sampler.elapsed(), loss)
        else:
            self._tell(Joined(step, self._ranks.merge_own(tables), loss=loss))

    def _read_ranks(self, closing: bool = False, waits: bool = True) -> None:
        """Reports the samples that all ranks have posted."""
        if not self._ranks.is_distributed():
            return
        for one in self._ranks.read(self.steps, self._sampler.budget, LEAST_SECONDS, closing, waits):
            self._first_step_within_budget = one.first_step
            self._report_rank(self._ranks.explain(one))
            self._tell(one)
            if one.loss:
                self._tell_loss(one.step, one.loss)
        if self._ranks.alone and not closing:
            self._report_rank(f"{self._ranks.name()}: {self._ranks.alone}, so this rank is watched alone")

    def _report_rank(self, text: str) -> None:
        if text:
            self._teller.warn_once(f"ranks {text[:40]}", text)
            if self.on_failure == "stop":
                self.close()

    def _tell(self, joined: Joined) -> None:
        """Reports a sample and its incidents, the same on every rank."""
        scalars = self._teller.tell_sample(joined, self.model, self._every_step.loss.last, self._ranks.is_first())
        self._every_step.note_sample(joined.step, scalars)
        self._sampler.schedule.look_closer(joined.step, self._incidents.is_suspicious)


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


_watching: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _read_last_samples() -> None:
    """Reads what a loop that ended without `close` has left: the step before a crash is the one to know about."""
    for monitor in list(_watching):
        monitor._guarded(monitor._read_sample)
