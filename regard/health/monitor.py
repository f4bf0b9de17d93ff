"""`Monitor`: measure attention during training on a sample of steps, log numbers per head, warn of bad trends."""

from __future__ import annotations

import math
import numbers
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.health.capture.interception import Interception, close_scope, open_scope, refuse_data_parallel
from regard.health.measurement.recorder import Layer, merge_uses
from regard.health.readings.heads import SEES_NOTHING, heads_of
from regard.health.readings.histogram import NAMES, ROW
from regard.health.watching.timed_recorder import TimedRecorder
from regard.health.watching.trends import SAMPLES, Trends
from regard.health.watching.writers import MEANS, make_writer

MISSED = 3  # consecutive steps without a forward before a warning
SKIPPED, SKIPPED_SHARE = 20, 0.75  # samples that the budget skipped, and their share, before a warning
WRAPPERS = ("_fn", "compile_wrapper")  # torch's frames around compiled functions, and around disabled ones


class AttentionWarning(UserWarning):
    """Warns that a head is unhealthy or about to be, or that something is not watched."""


class Monitor:
    """Measures every head on every `every`-th training step, logs the numbers and warns of bad trends.

    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True, dropout=0.0)
    >>> rows = []
    >>> monitor = regard.Monitor(layer, every=2, log=rows.append)
    >>> for step in range(3):
    ...     loss = layer(torch.randn(2, 8, 32)).square().mean()
    >>> monitor.close()
    >>> [(row["step"], row["head"]) for row in rows]
    [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (3, 1), (3, 2), (3, 3)]

    Args:
        model: the model in training. Each forward in training mode is a step; nothing else needs to be called.
        every: measure one step in this many.
        log: a TensorBoard writer or any object with `add_scalar`, a Weights & Biases run (any object whose `log` takes
            a dict), the path of a JSONL file, a function that takes a dict per head, or None. A number that a sample
            lacks (an entropy ratio if all rows see one key) is NaN, in the file null.
        budget: the fraction of the training time that measuring may take; a sample that would exceed it is skipped.
            Warns once if most samples are skipped.
        sequences: how many sequences of a batch are measured; None for all.

    Raises:
        TypeError: `model` is not an nn.Module, or `log` is none of the above.
        ValueError: A number lies outside its range, or the model was compiled in place or is `nn.DataParallel` over
            several devices.
    """

    def __init__(
        self, model: nn.Module, every: int = 100, log: Any = None, *, budget: float = 0.02, sequences: int | None = 1
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        refuse_data_parallel(model)
        if model._compiled_call_impl is not None:
            raise ValueError(
                "model was compiled in place, which skips its hooks; pass the module that torch.compile(model) returns"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an int ≥ 1, got {every!r}")
        number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
        if not (number and 0.0 < budget <= 1.0):
            raise ValueError(f"budget must be a number in (0, 1], got {budget!r}")
        if sequences is not None and (isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 1):
            raise ValueError(f"sequences must be an int ≥ 1, or None for all, got {sequences!r}")
        self.model, self.every, self.budget, self.sequences = model, every, budget, sequences
        self.step = 0
        self.samples = 0
        self.left_out = 0  # samples skipped because of the budget
        self.spent = 0.0  # seconds spent on measuring
        self.unmeasured: dict[str, str] = {}
        self._write = make_writer(log)
        self._started: float | None = None
        self._given_step: int | None = None
        self._missed = 0  # consecutive steps without a forward
        self._sampled_step: int | None = None
        self._skipped_step: int | None = None
        self._samples: dict[int, tuple] = {}  # open samples by thread
        self._lock = threading.RLock()  # for the numbers above; never held during a forward
        self._trends = Trends()
        self._warned: set[str] = set()
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self._before), prepend=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
        ]

    def close(self) -> None:
        """Stop watching and remove the hooks."""
        self._end_sample()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def trainer_callback(self) -> Any:
        """A callback for `transformers.Trainer(callbacks=[…])`; steps are then the trainer's."""
        from regard.health.watching.callbacks import trainer_callback

        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A callback for `lightning.Trainer(callbacks=[…])`; steps are then the trainer's."""
        from regard.health.watching.callbacks import lightning_callback

        return lightning_callback(self)

    def at_step(self, step: int) -> None:
        """Set the number of the next step; forwards are not counted from then on. The callbacks call it."""
        self._given_step = step
        self._missed += 1  # reset by the next forward
        if self._missed > MISSED:
            self._warn(
                "missed",
                f"Monitor saw {MISSED} steps without a forward of the model in training mode, so nothing is watched. "
                "Pass it the module that a step calls (with Lightning, the one that training_step calls).",
            )

    def _before(self, module: nn.Module, inputs: tuple) -> None:
        if module is not self.model:  # a copy, which has its hooks
            return
        self._end_sample()
        if not module.training:
            return
        now = time.perf_counter()
        with self._lock:
            self._started = now if self._started is None else self._started
            self._missed = 0
            self.step = step = self.step + 1 if self._given_step is None else self._given_step
            if (step - 1) % self.every or step == self._sampled_step:
                return
            if self.spent > self.budget * (now - self._started):
                self._skip(step)
                return
            self._sampled_step = step
        if _in_compiled_code():
            self._warn(
                "compiled", "The model runs compiled, so nothing is watched. Pass Monitor what torch.compile returned."
            )
            return
        recorder = TimedRecorder(sequences=self.sequences)
        context = Interception(module, observe=recorder).in_forward()
        open_scope(context)
        self._samples[threading.get_ident()] = recorder, context, step, time.perf_counter() - now

    def _skip(self, step: int) -> None:
        self.left_out += step != self._skipped_step  # a step may have several forwards
        self._skipped_step = step
        due = self.samples + self.left_out
        if self.left_out >= SKIPPED and self.left_out > SKIPPED_SHARE * due:
            self._warn(
                "budget",
                f"Monitor skipped {self.left_out} of {due} samples to stay within budget={self.budget:g}; warnings "
                f"need {SAMPLES} samples. Raise `budget` or `every`.",
            )

    def _end_sample(self) -> None:
        """Close a sample whose forward was aborted by KeyboardInterrupt; torch runs no hooks then."""
        if (sample := self._samples.pop(threading.get_ident(), None)) is not None:
            close_scope(sample[1])

    def _after(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        finished = time.perf_counter()
        if module is not self.model or (sample := self._samples.pop(threading.get_ident(), None)) is None:
            return
        recorder, _, step, opening = sample
        close_scope(sample[1])
        if output is None and sys.exc_info()[1] is not None:  # the forward raised: not a sample
            return
        recorder.finish_batch()
        with self._lock:
            self._report(recorder, step, finished - opening)

    def _report(self, recorder: TimedRecorder, step: int, began: float) -> None:
        layers, rows = merge_uses(recorder.layers.values()), []
        for layer in layers:
            if layer.reading is not None:
                rows += self._record(layer, step)
            else:
                self.unmeasured[layer.label] = layer.reason or "it was not reached"
        labels = {layer.index: layer.label for layer in layers}
        for text in self._trends.add(rows, heads_of(layers), labels, layers):
            warnings.warn(text, AttentionWarning, stacklevel=2)
        if not layers and not self.samples:
            self._warn("unmeasured", "No attention call was seen in the model's forward, so nothing is watched.")
        for label, reason in self.unmeasured.items():
            self._warn(f"unmeasured {label}", f"{label}: not watched: {reason}")
        if self.samples:  # the first one compiles kernels, which does not count
            self.spent += recorder.seconds + time.perf_counter() - began
        self.samples += 1

    def _record(self, layer: Layer, step: int) -> list[dict]:
        reading = layer.reading.cpu()
        means = reading.mean.masked_fill(reading.count == 0, math.nan).tolist()
        tops = reading.high[NAMES.index("max_logit")].tolist()
        rows = []
        for head, counted in enumerate(reading.count[ROW["visible_keys"]].tolist()):
            if not counted:  # no row of it sees a key and is not padding
                continue
            row = dict(step=step, layer=layer.label, head=head, max_logit=tops[head])
            rows.append(row | {name: means[NAMES.index(name)][head] for name in MEANS})
        if rows:
            self._log(rows)
        elif any(layer.empty_rows):
            self.unmeasured[layer.label] = SEES_NOTHING
        return rows

    def _log(self, rows: list[dict]) -> None:
        try:
            self._write(rows)
        except Exception as error:  # a failing log must not stop training
            why = f"{type(error).__name__}: {error}"
            self._warn("log", f"The monitor's log failed at step {rows[0]['step']}, and rows are lost: {why}")

    def _warn(self, kind: str, text: str) -> None:
        """Warn once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, AttentionWarning, stacklevel=2)


class _Hook:
    """A hook that torch.compile does not trace; in a copy of the model, or a saved one, it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call: Callable[..., None] | None = torch.compiler.disable(call)

    def __call__(self, *args: Any) -> None:
        if self.call is not None:
            self.call(*args)

    def __getstate__(self) -> dict[str, None]:
        return {"call": None}


def _in_compiled_code() -> bool:
    """True if a compiled forward called the hook: its attention calls can no longer be intercepted."""
    frame, wrappers = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code.co_name in WRAPPERS and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            wrappers += 1
        frame = frame.f_back
    return wrappers > 1  # one is that of `torch.compiler.disable` around the hook
