"""Watch attention while a model trains: a sample of steps, scalars per head, a warning when a trend is bad."""

from __future__ import annotations

import math
import numbers
import sys
import threading
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from regard.health.capture.interception import Interception, close_scope, open_scope, refuse_data_parallel
from regard.health.measurement.recorder import Layer, Recorder, merge_uses
from regard.health.readings.heads import SEES_NOTHING, heads_of
from regard.health.readings.histogram import NAMES, ROW
from regard.health.watching.trends import Trends
from regard.health.watching.writers import MEANS, writer

MISSED = 3  # steps without a forward: one may have been skipped
LEFT, MOST = 20, 0.75  # samples that the budget left out, and their share, from which on it is told
WRAPPERS = ("_fn", "compile_wrapper")  # how torch's frames about compiled, and not to be compiled, functions are called


class AttentionWarning(UserWarning):
    """A head is in trouble or heads for it, or something is not watched."""


class Monitor:
    """Every `every`-th training step, measure each head on the way and write what was found.

    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True, dropout=0.0)
    >>> rows = []
    >>> monitor = regard.Monitor(layer, every=2, log=rows.append)
    >>> for step in range(3):
    ...     loss = layer(torch.randn(2, 8, 32)).square().mean()
    >>> monitor.close()
    >>> [(row["step"], row["head"]) for row in rows]
    [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (3, 1), (3, 2), (3, 3)]

    Args:
        model: the model in training. Its forward in training mode is a step; nothing else need be called. Of
            `nn.DataParallel` over several devices the copy on the first of them is watched.
        every: measure one step in so many.
        log: a TensorBoard writer or any object with `add_scalar`, a Weights & Biases run (any object whose `log` takes
            a dict), a path of a JSONL file, a function that takes a dict per head, or None. A number that a head has
            not in this sample (an entropy ratio where all rows see one key) is NaN, in the file null.
        budget: the share of the training time that it may cost; a sample that would exceed it is left out. Where that
            befalls most of them, it warns once.
        sequences: how many sequences of a batch are measured; None for all of them.
    """

    def __init__(
        self, model: nn.Module, every: int = 100, log=None, *, budget: float = 0.02, sequences: int | None = 1
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        refuse_data_parallel(model)
        if model._compiled_call_impl is not None:
            raise ValueError(
                "model was compiled in place, where no hook is called; watch what torch.compile(model) returns instead"
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
        self.left_out = 0  # samples that were due, for the budget
        self.spent = 0.0  # seconds of measuring
        self.unmeasured: dict[str, str] = {}
        self._write = writer(log)
        self._begun: float | None = None
        self._given_step: int | None = None
        self._missed = 0  # steps on end that began and had no forward
        self._sampled_step: int | None = None
        self._left_step: int | None = None
        self._samples: dict[int, tuple] = {}  # under way, by thread
        self._turn = threading.RLock()  # of the numbers above; never held over a forward
        self._trends = Trends()
        self._warned: set[tuple] = set()
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self._before), prepend=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
        ]

    def close(self) -> None:
        """Stop watching; the model is as it was."""
        self._end_sample()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def trainer_callback(self):
        """For `transformers.Trainer(callbacks=[monitor.trainer_callback()])`: steps are the trainer's."""
        from regard.health.watching.callbacks import trainer_callback

        return trainer_callback(self)

    def lightning_callback(self):
        """For `lightning.Trainer(callbacks=[monitor.lightning_callback()])`: steps are the trainer's."""
        from regard.health.watching.callbacks import lightning_callback

        return lightning_callback(self)

    def at_step(self, step: int) -> None:
        """Say which step comes; from then on steps are not counted by forwards. The callbacks call it."""
        self._given_step = step
        self._missed += 1  # until its forward begins
        if self._missed > MISSED:
            told = f"{MISSED} steps passed without a forward of it in training mode, and nothing is watched; give the "
            told += "monitor the module that a step calls (with Lightning, the one that training_step calls)"
            self._warn("the model", "missed", told)

    def _before(self, module, inputs) -> None:
        if not self._stands_for_it(module):
            return
        self._end_sample()
        if not module.training:
            return
        now = time.perf_counter()
        with self._turn:
            self._begun = now if self._begun is None else self._begun
            self._missed = 0
            self.step = step = self.step + 1 if self._given_step is None else self._given_step
            due = (step - 1) % self.every == 0 and step != self._sampled_step
            if not due:
                return
            if self.spent > self.budget * (now - self._begun):
                self._leave_out(step)
                return
            self._sampled_step = step
        if _in_compiled_code():
            told = "it runs inside what torch.compile made of it; give the monitor that instead. Nothing is watched"
            self._warn("the model", "compiled", told)
            return
        recorder = _Timed(sequences=self.sequences)
        context = Interception(module, observe=recorder).in_forward()
        open_scope(context)
        self._samples[threading.get_ident()] = recorder, context, step, time.perf_counter() - now

    def _leave_out(self, step: int) -> None:
        self.left_out += step != self._left_step  # a step may have several forwards
        self._left_step = step
        due = self.samples + self.left_out
        if self.left_out >= LEFT and self.left_out > MOST * due:
            told = f"samples cost more than budget={self.budget:g} of the time: {self.left_out} of {due} were left "
            told += "out, and a head is called ill after ten; raise budget to have more of them"
            self._warn("the monitor", "budget", told)

    def _stands_for_it(self, module: nn.Module) -> bool:
        """Is it the model, or that copy of nn.DataParallel's which runs on its device? Every copy has its hooks."""
        copied = getattr(module, "_is_replica", False)
        return module is self.model or (copied and _device(module) == _device(self.model))

    def _end_sample(self) -> None:
        """Close what is still open, of a forward that Ctrl-C ended: torch calls no hook then."""
        if (sample := self._samples.pop(threading.get_ident(), None)) is not None:
            close_scope(sample[1])

    def _after(self, module, inputs, output) -> None:
        started = time.perf_counter()
        if not self._stands_for_it(module) or (sample := self._samples.pop(threading.get_ident(), None)) is None:
            return
        recorder, _, step, opening = sample
        close_scope(sample[1])
        if output is None and sys.exc_info()[1] is not None:  # the forward raised: what it told is not a sample
            return
        recorder.finish_batch()
        with self._turn:
            self._tell(recorder, step, started - opening)

    def _tell(self, recorder: _Timed, step: int, began: float) -> None:
        layers, rows = merge_uses(recorder.layers.values()), []
        for layer in layers:
            if layer.reading is not None:
                rows += self._record(layer, step)
            else:
                self.unmeasured[layer.label] = layer.reason or "it was not reached"
        labels = {layer.index: layer.label for layer in layers}
        for told in self._trends.add(rows, heads_of(layers), labels, layers):
            warnings.warn(told, AttentionWarning, stacklevel=2)
        self._tell_unmeasured(len(layers))
        if self.samples:  # the first one compiles kernels, which is not held against the budget
            self.spent += recorder.seconds + time.perf_counter() - began
        self.samples += 1

    def _tell_unmeasured(self, layers: int) -> None:
        if layers == 0 and not self.samples:
            self._warn("the model", "unmeasured", "no attention call was seen in its forward; nothing is watched")
        for label, reason in self.unmeasured.items():
            self._warn(label, "unmeasured", f"it is not watched: {reason}")

    def _record(self, layer: Layer, step: int) -> list[dict]:
        reading = layer.reading.cpu()
        means = reading.mean.masked_fill(reading.count == 0, math.nan).tolist()
        tops = reading.high[NAMES.index("max_logit")].tolist()
        rows = []
        for head, counted in enumerate(reading.count[ROW["visible_keys"]].tolist()):
            if not counted:  # this sample has no row of it that sees a key and is no padding
                continue
            row = dict(step=step, layer=layer.label, head=head, max_logit=tops[head])
            rows.append(row | {name: means[NAMES.index(name)][head] for name in MEANS})
        if rows:
            self._log(rows)
        elif any(layer.blind):
            self.unmeasured[layer.label] = SEES_NOTHING
        return rows

    def _log(self, rows: list[dict]) -> None:
        try:
            self._write(rows)
        except Exception as error:  # whatever a log does, training goes on
            told = f"it failed at step {rows[0]['step']}, and rows are lost: {type(error).__name__}: {error}"
            self._warn("the monitor's log", "log", told)

    def _warn(self, where: str, kind: str, what: str) -> None:
        if (where, kind) not in self._warned:
            self._warned.add((where, kind))
            warnings.warn(f"{where}: {what}", AttentionWarning, stacklevel=2)


class _Hook:
    """A hook that torch.compile leaves as it is; in a copy of the model, or in a file of it, it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = torch.compiler.disable(call)

    def __call__(self, *args) -> None:
        if self.call is not None:
            self.call(*args)

    def __getstate__(self) -> dict:
        return {"call": None}


def _device(module: nn.Module) -> torch.device | None:
    """Where its weights are; those of a replica are parameters no more."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *getattr(part, "_former_parameters", {}).values()):
            if tensor is not None:
                return tensor.device
    return None


def _in_compiled_code() -> bool:
    """Was the hook called from a compiled forward, where it is too late to look into it?"""
    frame, wrappers = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code.co_name in WRAPPERS and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            wrappers += 1
        frame = frame.f_back
    return wrappers > 1  # one is that of `torch.compiler.disable` about the hook


class _Timed(Recorder):
    """A recorder that knows what it cost beyond what the model does anyway, and whose failure is not the model's."""

    seconds = 0.0
    replaces = False

    def __call__(self, call, name, otherwise):
        own, outputs, failed = 0.0, [], False

        def timed():
            nonlocal own, failed
            before = _now(call.q)
            failed = True
            outputs.append(otherwise())
            failed = False
            own += _now(call.q) - before
            return outputs[-1]

        before = _now(call.q)
        try:
            output = super().__call__(call, name, timed)
        except Exception as error:
            if failed:
                raise
            self.layers[self.key].mark_unmeasured(f"measuring failed: {type(error).__name__}: {error}")
            self._batch.pop(self.key, None)
            output = outputs[-1] if outputs else timed()
        self.seconds += _now(call.q) - before - own
        return output


def _now(x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
