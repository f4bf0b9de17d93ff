"""Catch every attention call inside a model, on the path that the model takes anyway.

Two doors, shut again afterwards: transformers' attention registry (`huggingface.py`), and torch's functions and
regard's own op (`torch_door.py`). A call becomes a `Call`; swaps may change it, then an observer gives the output, or
the model's own way does. Each thread has its own forwards, and an observer sees those of the thread that started it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import UserList
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from regard.health.capture.call import MAPPED, Call, forget_masks, is_vmapped, laid_out
from regard.health.capture.forward_scope import OPENED, bury_dead, close_forward, open_forward
from regard.health.capture.layer_keys import given_tokens
from regard.health.capture.threads import PerThread, SlowPath

SDPA = torch.nn.functional.scaled_dot_product_attention
PLAIN = (
    nn.Linear,
    nn.LayerNorm,
    nn.Embedding,
    nn.Dropout,
    nn.Conv1d,
    nn.Conv2d,
    nn.GELU,
    nn.ReLU,
)  # no attention inside
SMALL = ("Norm", "Embedding", "Activation")  # nor in what is called so; if there were, it would go by the name above


def as_written(model: nn.Module) -> nn.Module:
    """What torch.compile was given, where `model` is what it returned: layers have the names they have there."""
    return getattr(model, "_orig_mod", model)


def as_copied(model: nn.Module) -> nn.Module:
    """What nn.DataParallel copies to its devices, where `model` is one that has several: it is the copies that run."""
    return model.module if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1 else model


class Interception:
    """While started, calls inside `model` go to `swap` (Call → Call), then to `observe` (Call → output).

    With `opens`, torch's own functions are caught in every forward of the model or of a part of it; otherwise only
    within `torch_calls()`.
    """

    def __init__(
        self, model: nn.Module, *, swap: Callable | None = None, observe: Callable | None = None, opens: bool = False
    ) -> None:
        self.model, self.swap, self.observe, self.opens = model, swap, observe, opens
        self.modules = list(as_written(model).named_modules())
        self.names = {id(module): name for name, module in self.modules}
        self.names.setdefault(id(model), "")  # what torch.compile made of it
        self.thread: int | None = None  # whose calls an observer sees
        self._hooks: list = []
        self._compiled: list[tuple[nn.Module, Any]] = []  # in place, by module.compile()

    def sees(self, module: nn.Module) -> bool:
        return id(module) in self.names and self.thread in (None, threading.get_ident())

    def _every(self) -> list[nn.Module]:
        modules = [module for _, module in self.modules]
        return modules if self.model is modules[0] else [self.model, *modules]

    def start(self) -> None:
        bury_dead()
        if self.observe is not None:
            self.thread = threading.get_ident()
        with _DOORS:
            self._start()

    def _start(self) -> None:
        ACTIVE.append(self)
        for module in self._every():
            if module._compiled_call_impl is not None:
                self._compiled.append((module, module._compiled_call_impl))
                module._compiled_call_impl = None
            if module._modules or not (isinstance(module, PLAIN) or type(module).__name__.endswith(SMALL)):
                self._hooks.append(module.register_forward_pre_hook(partial(_enter, self.thread), with_kwargs=True))
                self._hooks.append(module.register_forward_hook(partial(_leave, self.thread), always_call=True))
        if "transformers" in sys.modules:
            from regard.health.capture import transformers_calls

            transformers_calls.open_door()

    def stop(self) -> None:
        bury_dead()
        with _DOORS:
            self._stop()

    def _stop(self) -> None:
        ACTIVE.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, call in self._compiled:
            heir = next((one for one in ACTIVE if id(module) in one.names), None)  # that runs it as written too
            if heir is None:
                module._compiled_call_impl = call
            else:
                heir._compiled.append((module, call))
        self._compiled.clear()
        if not ACTIVE and "transformers" in sys.modules:
            from regard.health.capture import transformers_calls

            transformers_calls.close_door()

    @contextlib.contextmanager
    def torch_calls(self):
        """Catch torch's own attention functions too, in this thread; what was compiled runs as it was written."""
        depth = len(_STACK)
        compiled = any("_orig_mod" in module._modules for module in self._every())
        eagerly = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
        from regard.health.capture.torch_calls import Mode

        try:
            with eagerly, _SLOW_PATH, _pushed(Mode()):
                yield
        finally:
            del _STACK[depth:]

    @contextlib.contextmanager
    def in_forward(self):
        """All of it for a forward of the model that begins just now, in its pre-hook: see `open_forward`."""
        with self:
            own = self.model._forward_pre_hooks.keys() | self.model._forward_hooks.keys()
            # torch walks through the model's own hooks when its forward raises: none may go then, so they go now
            for hook in [hook for hook in self._hooks if hook.id in own]:
                hook.remove()
            with self.torch_calls():
                _STACK.append((as_written(self.model), object()))  # in the place of its own hooks
                yield
        forget_masks()

    def __enter__(self) -> Interception:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()


ACTIVE: list[Interception] = []  # other threads start and stop theirs meanwhile: whoever walks it takes a copy
_DOORS = threading.RLock()  # of those who open and shut
_SLOW_PATH = SlowPath()
_STACK: UserList[tuple[nn.Module, Any]] = (
    PerThread()
)  # the modules whose forward is running, and a token of the step it belongs to
_BUSY = PerThread([False])  # inside a caught call: what it calls is not caught again


def _enter(thread: int | None, module, inputs, named=None) -> None:  # None: its hook was just taken off elsewhere
    if torch.compiler.is_compiling() or thread not in (None, threading.get_ident()):  # forwards of others are theirs
        return
    if OPENED and any(module is one.model for one in ACTIVE[:]):
        bury_dead()
    if not OPENED:
        for one in ACTIVE[:]:
            if one.opens and id(module) in one.names:
                open_forward(one.torch_calls())
                break
    _STACK.append((module, object() if given_tokens(inputs, named or {}) else step()))


def _leave(thread: int | None, module, inputs, output) -> None:
    if torch.compiler.is_compiling() or thread not in (None, threading.get_ident()):
        return
    if _STACK and _STACK[-1][0] is module:
        _STACK.pop()
    close_forward()


@contextlib.contextmanager
def _pushed(mode: TorchFunctionMode):
    mode.__enter__()
    try:
        yield
    finally:
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is mode:  # autograd restores the stack it found
            mode.__exit__(None, None, None)


def watched(module: nn.Module | None) -> list[Interception]:
    """Who has a say in calls of that module; nobody where torch.compile reads it: its code would keep what they say."""
    if torch.compiler.is_compiling():
        return []
    return [] if _BUSY[0] or module is None else [one for one in ACTIVE[:] if one.sees(module)]


def attend(call: Call, otherwise: Callable[[], Tensor]) -> Tensor:
    """The output of a caught call: swaps first, then observers; `otherwise` is the model's own way, dropout and all."""
    before, _BUSY[0] = _BUSY[0], True
    try:
        with _mode_aside():
            return _attended(call, otherwise)
    finally:
        _BUSY[0] = before


def _attended(call: Call, otherwise: Callable[[], Tensor]) -> Tensor:
    swapped, active = call, ACTIVE[:]
    for one in active:
        if one.swap is not None and one.sees(call.module):
            swapped = one.swap(swapped)
    if swapped is not call:
        otherwise = partial(_run, swapped)
    if any(is_vmapped(x) for x in (call.q, call.k, call.v, call.mask)):
        swapped = replace(swapped, obstacle=MAPPED)
    for one in reversed(active):  # the first one asked has the others behind it
        if one.observe is not None and one.sees(call.module):
            otherwise = partial(one.observe, swapped, one.names[id(call.module)], otherwise)
    return otherwise()


def _run(call: Call) -> Tensor:
    return laid_out(call.run())


class Catching(TorchFunctionMode):
    """The mode of `torch_door`."""


@contextlib.contextmanager
def _mode_aside():
    """Without our mode, where it is the innermost one: nothing is caught in here, and each torch call is cheaper."""
    depth = torch._C._len_torch_function_stack()
    if not depth or not isinstance(torch._C._get_function_stack_at(depth - 1), Catching):
        yield
        return
    with _pop_mode_temporarily():
        yield


def running() -> nn.Module | None:
    """The innermost module whose forward runs, of those that are watched."""
    return _STACK[-1][0] if _STACK else None


def step() -> Any:
    """A token of the innermost running forward that was given tokens; another forward, another token."""
    return _STACK[-1][1] if _STACK else None
