"""Hooks on a model's modules, and the interceptions that every captured attention call is routed through.

A captured call is a `Call`. Swaps may change it; then an observer computes its output, or the model's own function.
`torch_calls.py` captures torch's functions and regard's op, `handwritten.py` attention written out, `packages.py`
functions of other packages, `transformers_calls.py` the registry of transformers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from regard.health.capture.call import UNDER_VMAP, Call, forget_derived, in_torch_layout, is_vmapped

SDPA = torch.nn.functional.scaled_dot_product_attention
WITHOUT_ATTENTION = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.GELU, nn.ReLU)
PLACES = (f"{torch.__path__[0]}/", __file__.rpartition("health")[0])  # files of torch and of regard
SUFFIXES_WITHOUT_ATTENTION = ("Norm", "Embedding", "Activation", "Conv1D")  # of class names


def as_written(model: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` was given, where `model` is what it returned."""
    return getattr(model, "_orig_mod", model)


def check_model(model: Any) -> None:
    """Raises TypeError for what is no module, ValueError for `nn.DataParallel`, because it runs copies of the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError("model is nn.DataParallel, which runs copies of it; use DistributedDataParallel")


class Frame(NamedTuple):
    """One forward of a module that runs: the module, a token of the whole forward, and what the module was given."""

    module: nn.Module
    token: Any
    inputs: tuple = ()


class ThreadState(threading.local):
    """What one thread is running; each thread has its own."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []  # modules whose forward runs
        self.scopes: list[tuple[contextlib.AbstractContextManager, int, Any]] = []  # context, stack depth, owner
        self.captures = 0  # `torch_calls` blocks that are open
        self.busy = False  # inside a captured call: what it calls is not captured again
        self.weights_depth: int | None = None  # of the stack where a forward was given output_attentions=True
        self.multi_head: dict | None = None  # passed by a multi-head call to the sdpa call inside it


STATE = ThreadState()


def open_scope(context: contextlib.AbstractContextManager, owner: Any = None) -> None:
    """Enters a context in a forward pre-hook; `close_scope` leaves it in the forward hook."""
    depth = len(STATE.stack)
    context.__enter__()
    STATE.scopes.append((context, depth, owner))


def close_scope(context: contextlib.AbstractContextManager) -> None:
    """Leaves a context if it is open, and all that were entered after it."""
    at = next((at for at, scope in enumerate(STATE.scopes) if scope[0] is context), None)
    while at is not None and len(STATE.scopes) > at:
        STATE.scopes.pop()[0].__exit__(None, None, None)


def close_scopes(owner: Any = None) -> None:
    """Leaves the contexts of one owner that are open in this thread, or all of them."""
    for context, _, opened_by in STATE.scopes[:]:
        if owner is None or opened_by is owner:
            close_scope(context)


class Interception:
    """While started, calls inside `model` go to `swap` (Call → Call), then to `observe` (Call → output).

    With `in_every_forward`, torch's own functions are captured in every forward of the model or of a part of it;
    otherwise only within `torch_calls()`. Without `follows_functions` they are not captured: transformers' registry
    and other packages alone are. `saw_functions` says whether a block of `torch_calls` met one that may be attention,
    `describe` what a report says of a swap.
    """

    def __init__(
        self, model: nn.Module, *, swap: Callable[[Call], Call] | None = None,
        observe: Callable[[Call, str, Callable[[], Tensor]], Tensor] | None = None, in_every_forward: bool = False,
        follows_functions: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.swap, self.observe, self.in_every_forward = model, swap, observe, in_every_forward
        self.follows_functions, self.saw_functions = follows_functions, False
        self.describe: Callable[[], dict[str, Any]] | None = None
        self.routed = 0  # calls
        self.modules = list(as_written(model).named_modules())
        self.names = {id(module): name for name, module in self.modules}
        self.names.setdefault(id(model), "")  # what torch.compile made of it
        self._hooks: list = []

    def start(self) -> None:
        """Registers the hooks; whatever torch.compile made in this process runs as it was written until `stop`."""
        close_scopes()
        with _LOCK:
            self._start()
            STARTED.append(self)
            run_as_written()

    def _start(self) -> None:
        if not ACTIVE:
            _FAST_PATH[0] = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder's, whose attention no hook sees
        ACTIVE.append(self)
        written = [module for _, module in self.modules]
        for module in written if self.model is written[0] else [self.model, *written]:
            if module._modules or not _lacks_attention(type(module)):  # type: ignore[arg-type]
                self._hooks.append(module.register_forward_pre_hook(_enter_forward, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(_leave_forward, always_call=True))
        from regard.health.capture import packages

        packages.patch_packages()

    def stop(self) -> None:
        """Removes the hooks and leaves the model as it was."""
        close_scopes()
        with _LOCK:
            self._stop()
            STARTED.remove(self)
            if not STARTED and _STANCE:
                _STANCE.pop().__exit__(None, None, None)

    def _stop(self) -> None:
        ACTIVE.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not ACTIVE:
            torch.backends.mha.set_fastpath_enabled(_FAST_PATH[0])
            from regard.health.capture import packages

            packages.unpatch_packages()

    @contextlib.contextmanager
    def torch_calls(self) -> Iterator[None]:
        """Captures torch's own attention functions in this thread; what was compiled runs as it was written."""
        depth = len(STATE.stack)
        is_needed = has_compiler() and not _STANCE
        eagerly = torch.compiler.set_stance("force_eager") if is_needed else contextlib.nullcontext()
        from regard.health.capture.torch_calls import TorchCalls

        mode = TorchCalls() if self.follows_functions else None
        STATE.captures += 1
        try:
            with eagerly, mode or contextlib.nullcontext():
                yield
        finally:
            self.saw_functions = mode is not None and mode.saw_attention
            STATE.captures -= 1
            del STATE.stack[depth:]
            STATE.weights_depth = None
            forget_derived()

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Captures one forward of the model that begins now, in its pre-hook: see `open_scope`."""
        with _LOCK:
            self._start()
        try:
            own = self.model._forward_pre_hooks.keys() | self.model._forward_hooks.keys()
            # torch iterates over the model's own hooks when its forward raises: none may be removed then
            for hook in [hook for hook in self._hooks if hook.id in own]:
                hook.remove()
            with self.torch_calls():
                STATE.stack.append(Frame(as_written(self.model), object()))  # in the place of its own hooks
                yield
        finally:
            with _LOCK:
                self._stop()

    def __enter__(self) -> Interception:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()


ACTIVE: list[Interception] = []
STARTED: list[Interception] = []  # those of ACTIVE that last longer than one forward
_STANCE: list[contextlib.AbstractContextManager] = []  # torch.compile's stance while any is started
_LOCK = threading.RLock()  # held while hooks and patches are put on or taken off, never over a forward
_FAST_PATH = [True]  # torch's setting before the first interception


def has_compiler() -> bool:
    """True if torch's compiler was imported; before that nothing can have been compiled. Its import takes seconds."""
    return "torch._dynamo" in sys.modules


def run_as_written() -> None:
    """Makes what torch.compile made run uncompiled until the last started interception stops.

    Compiled code calls no hooks of the model as written, so that nothing in it could be intercepted.
    """
    if has_compiler() and STARTED and not _STANCE:
        _STANCE.append(torch.compiler.set_stance("force_eager"))


@lru_cache(maxsize=256)
def _lacks_attention(kind: type[nn.Module]) -> bool:
    return issubclass(kind, WITHOUT_ATTENTION) or kind.__name__.endswith(SUFFIXES_WITHOUT_ATTENTION)


def _enter_forward(module: nn.Module, inputs: tuple, named: dict | None = None) -> None:
    if torch.compiler.is_compiling():
        return
    opener = next((one for one in ACTIVE[:] if one.in_every_forward and id(module) in one.names), None)
    if opener is not None:
        run_as_written()
        if module is opener.model:
            close_scopes(opener)  # of a forward that Ctrl-C ended
        if not STATE.scopes:
            open_scope(opener.torch_calls(), opener)
    if named and named.get("output_attentions") and STATE.weights_depth is None:
        STATE.weights_depth = len(STATE.stack)
    given = (*inputs, *named.values()) if named else inputs
    token = object() if is_given_tokens(given) else forward_token()
    STATE.stack.append(Frame(module, token, given))


def _leave_forward(module: nn.Module, inputs: tuple, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if STATE.stack and STATE.stack[-1][0] is module:
        STATE.stack.pop()
    if STATE.weights_depth is not None and len(STATE.stack) <= STATE.weights_depth:
        STATE.weights_depth = None
    if not STATE.stack:
        forget_derived()
    if STATE.scopes and len(STATE.stack) <= STATE.scopes[-1][1]:
        close_scope(STATE.scopes[-1][0])


def is_given_tokens(given: tuple) -> bool:
    """True if the first tensor that a module is given holds integers: there a new forward begins.

    >>> from regard.health.capture.interception import is_given_tokens
    >>> is_given_tokens((torch.arange(4),)), is_given_tokens((torch.randn(4, 8), torch.arange(4)))
    (True, False)
    """
    for x in given:
        if isinstance(x, Tensor):
            return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return False


def interceptions_of(module: nn.Module | None) -> list[Interception]:
    """Returns the active interceptions that cover `module` in this thread.

    Empty while torch.compile traces, because their effect would be baked into the graph.
    """
    if module is None or STATE.busy or not STATE.captures or torch.compiler.is_compiling():
        return []
    return [one for one in ACTIVE[:] if id(module) in one.names]


def describe_changes(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the options of every active `using` that covers `model`, as plain values, the first applied first."""
    return [one.describe() for one in ACTIVE if one.describe is not None and id(model) in one.names]


def route(call: Call, run_original: Callable[[], Tensor], swaps: bool = True) -> Tensor:
    """Returns the output of a captured call: swaps first, then observers; `run_original` is the model's own way.

    Without `swaps` it goes to observers alone, because it cannot be computed in another way.
    """
    active = [one for one in interceptions_of(call.module) if swaps or one.observe is not None]
    swapped, run = call, run_original
    with uncaptured():
        for one in active:
            one.routed += 1
            if one.swap is not None:
                swapped = one.swap(swapped)
        if swapped is not call:
            run = partial(_run_swapped, swapped)
        if active and any(is_vmapped(x) for x in (call.q, call.k, call.v, call.mask)):
            swapped = replace(swapped, obstacle=UNDER_VMAP)
        for one in reversed(active):  # the first observer is outermost
            if one.observe is not None:
                run = partial(one.observe, swapped, one.names[id(call.module)], run)
        return run()


def _run_swapped(call: Call) -> Tensor:
    return in_torch_layout(call.run())


def is_swapped(module: nn.Module) -> bool:
    """True if a swap covers `module`, so that what is computed for its calls needs gradients."""
    return any(one.swap is not None for one in interceptions_of(module))


def route_result(
    call: Call, run: Callable[[], Any], to_output: Callable, from_output: Callable, returns_more: bool = False
) -> Any:
    """Returns what a model's function returns: `run()` or, where a swap has changed the call, the swapped output.

    `to_output` takes what the function returns to the output [B, H, M, E], `from_output` takes that back. A function
    that `returns_more` than an output runs once more for the rest.
    """
    results: list[Any] = []

    def run_original() -> Tensor:
        results.append(run())
        return to_output(results[0])

    output = route(call, run_original)
    if results:
        return results[0]
    rest = run() if returns_more else None
    return (from_output(output), *rest[1:]) if isinstance(rest, tuple) else from_output(output)


@contextlib.contextmanager
def uncaptured() -> Iterator[None]:
    """Captures nothing of what the body calls in this thread."""
    before, STATE.busy = STATE.busy, True
    try:
        with without_mode():
            yield
    finally:
        STATE.busy = before


def without_mode() -> contextlib.AbstractContextManager:
    """Pops our function mode where it is the innermost one: torch calls are cheaper without it."""
    depth = torch._C._len_torch_function_stack()
    is_ours = depth and getattr(torch._C._get_function_stack_at(depth - 1), "captures_attention", False)
    return _pop_mode_temporarily() if is_ours else contextlib.nullcontext()


def find_caller() -> tuple[FrameType, int]:
    """Returns the innermost frame of code that is neither torch's nor regard's, and its distance from the caller."""
    frame, distance = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PLACES):
        frame, distance = frame.f_back, distance + 1
    return frame, distance


def running_module() -> nn.Module | None:
    """Returns the innermost hooked module whose forward runs in this thread."""
    return STATE.stack[-1][0] if STATE.stack else None


def running_frame() -> Frame | None:
    """Returns the innermost running forward in this thread."""
    return STATE.stack[-1] if STATE.stack else None


def report_gate(gates: Tensor) -> None:
    """Tells observers of the running module the σ(g) that it multiplies an output by, or may multiply it by."""
    module = running_module()
    for one in interceptions_of(module):
        add = getattr(one.observe, "add_gate", None)
        if add is not None:
            add(one.names[id(module)], gates)


def forward_token() -> Any:
    """Returns an object that identifies the innermost running forward that was given tokens."""
    return STATE.stack[-1][1] if STATE.stack else None
