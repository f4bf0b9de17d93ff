"""`Probe`: runs a model and captures, changes or removes parts of its attention on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import Call, UseCounter, forget_derived
from regard.health.capture.forwards import forward_token
from regard.health.capture.fused_call import CHECKED
from regard.health.capture.interception import Interception
from regard.health.checks.rule import NotApplicable
from regard.health.tokens.text import TokenBatch

Key = tuple[str, int]  # a module's name, and which use of it in a forward
Transform = Callable[[Call, Key, Callable[[], Tensor]], Tensor]


class OutOfTime(NotApplicable):
    """Ends a check whose next forward would begin after the time of all checks."""


class StopForward(Exception):
    """Ends a forward whose rest is of no interest."""


@dataclass
class CapturedCall:
    """What one attention call was given and returned, detached."""

    key: Key
    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor  # [B, H, M, E]

    @property
    def visible(self) -> Tensor:
        """True at the keys that a query sees, of a shape that broadcasts to [B, H, M, N]."""
        shown = torch.ones(self.q.shape[2], self.k.shape[2], dtype=torch.bool, device=self.q.device)
        shown, mask = shown.tril() if self.call.causal else shown, self.call.mask
        if mask is None:
            return shown
        return shown & (mask if mask.dtype == torch.bool else mask > -torch.inf)


class Probe:
    """Intercepts the attention calls of a model, inside `with probe:`; `run` runs one batch."""

    def __init__(self, model: nn.Module, part: nn.Module | None = None) -> None:
        """`part` is the part of `model` whose module names count, if it is not the whole."""
        self.model = model
        self._uses = UseCounter()
        self._transform: Transform | None = None
        self.extra: dict[str, Any] = {}  # keyword arguments of every forward
        self.is_over: Callable[[], bool] | None = None  # whether no forward may begin any more
        self.was_stopped = False  # by that
        self._interception = Interception(model, swap=self._swap)
        self.modules, self.names = self._interception.modules, dict(self._interception.names)
        if part is not None and part is not model:
            self.names |= {id(module): name for name, module in part.named_modules()}

    @contextmanager
    def active(self) -> Iterator[Probe]:
        CHECKED.append(True)
        try:
            with self._interception, self._interception.torch_calls():
                yield self
        finally:
            CHECKED.pop()

    def _swap(self, call: Call) -> Call:
        transform = self._transform
        if transform is None or call.obstacle is not None:
            return call
        call = call.densified()  # of short texts; checks read masks entry by entry
        name = self.names[id(call.module)]
        key = name, self._uses.count(call, name, forward_token())

        def run() -> Tensor:
            return call.own(None) if call.weights is None else call.run()

        probed = copy.copy(call)
        probed.compute = lambda _: transform(call, key, run)
        return probed

    def run(self, batch: TokenBatch, transform: Transform | None = None) -> Tensor:
        """Returns the model's main output, detached; `transform(call, key, run)` returns the output of each call."""
        return main_output(self.run_model(batch, transform)).detach()

    def run_model(self, batch: TokenBatch, transform: Transform | None = None) -> Any:
        """Returns what the model returns."""
        return self.call(lambda: self.model(*batch.args, **{**batch.named, **self.extra}), transform)

    def call(self, function: Callable[[], Any], transform: Transform | None = None) -> Any:
        """Returns function(), which runs the model, with `transform` on its calls."""
        if self.is_over is not None and self.is_over():
            self.was_stopped = True
            raise OutOfTime("out of time")
        self._uses.begin()
        forget_derived()
        before, self._transform = self._transform, transform
        try:
            return function()
        finally:
            self._transform = before
            forget_derived()

    def capture(self, batch: TokenBatch) -> tuple[Tensor, dict[Key, CapturedCall]]:
        """Returns the main output, and every attention call in order."""
        calls: dict[Key, CapturedCall] = {}
        return self.run(batch, keep_calls(calls)), calls


def keep_calls(calls: dict[Key, CapturedCall]) -> Transform:
    """A transform that puts every attention call into `calls`, and changes none."""

    def keep(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        output = run()
        q, k, v, o = (x.detach().clone() for x in (call.q, call.k, call.v, output))
        calls[key] = CapturedCall(key, call, q, k, v, o)
        return output

    return keep


def remove_heads(heads: Iterable[tuple[Key, int]]) -> Transform:
    """A transform that sets the output of these heads to 0."""
    wanted: dict[Key, list[int]] = {}
    for key, head in heads:
        wanted.setdefault(key, []).append(head)

    def transform(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        output = run()
        if key not in wanted:
            return output
        return output.index_fill(1, torch.tensor(wanted[key], device=output.device), 0.0)

    return transform


def change_calls(change: Callable[[Call], Call]) -> Transform:
    """A transform that computes each call after `change`, as `regard.using` does."""

    def transform(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        return change(call).run()

    return transform


class NoOutput(NotApplicable, TypeError):
    """A model returns nothing that can be compared."""


def main_output(result: Any) -> Tensor:
    """The tensor that a model returns: logits, else hidden states, else the first tensor of real numbers."""
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(result, Tensor):
        return result
    parts = result if isinstance(result, (tuple, list)) else ()
    if isinstance(result, Mapping):
        parts = [x for name, x in result.items() if name != "loss"] or list(result.values())
    real = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    if real:
        return max(real[:2], key=lambda part: part.ndim > 0)  # a loss may come first
    raise NoOutput(f"the model returned {type(result).__name__}, which holds no tensor of real numbers")


def relative_change(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ over ‖a‖, of real tensors of one shape, over finite places; inf where only one is NaN or infinite."""
    a, b = a.double(), b.double()
    odd = ~(torch.isfinite(a) & torch.isfinite(b))
    if bool(odd.any()):
        if not torch.equal(a[odd].nan_to_num(7.0), b[odd].nan_to_num(7.0)):
            return float("inf")
        a, b = a[~odd], b[~odd]
    return float((a - b).norm() / a.norm().clamp_min(1e-30))
