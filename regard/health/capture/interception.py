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
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import UNDER_VMAP, Call, forget_derived, in_torch_layout, is_vmapped
from regard.health.capture.forwards import (
    STATE,
    Frame,
    as_written,
    close_scope,
    close_scopes,
    forward_token,
    is_given_tokens,
    open_scope,
    running_module,
    uncaptured,
)
from regard.health.capture.guard import Once, is_ours, say

WITHOUT_ATTENTION = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.GELU, nn.ReLU)
RECHECKED = 64  # one forward in so many is followed though none of its kind needed it
SUFFIXES_WITHOUT_ATTENTION = ("Norm", "Embedding", "Activation", "Conv1D")  # of class names


def check_model(model: Any) -> None:
    """Raises TypeError for what is no module, ValueError for `nn.DataParallel`, because it runs copies of the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError("model is nn.DataParallel, which runs copies of it; use DistributedDataParallel")


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
        self.needs_frames = observe is not None  # does somebody ask what module runs, and what it was given?
        self._unfollowed: dict[Any, int] = {}  # kind of forward -> how many ran since one was followed
        self.modules = list(as_written(model).named_modules())
        self.names = {id(module): name for name, module in self.modules}
        self.names.setdefault(id(model), "")  # what torch.compile made of it
        self._hooks: list = []

    def start(self) -> None:
        """Registers the hooks; whatever torch.compile made in this process runs as it was written until `stop`."""
        close_scopes()
        with _LOCK:
            STARTED.append(self)
            try:
                self._start()
                run_as_written()
            except BaseException:  # Ctrl-C too
                self.stop()
                raise

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
        if self in ACTIVE:
            ACTIVE.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not ACTIVE:
            torch.backends.mha.set_fastpath_enabled(_FAST_PATH[0])
            from regard.health.capture import packages

            packages.unpatch_packages()

    @contextlib.contextmanager
    def torch_calls(self, forward: Any = None) -> Iterator[None]:
        """Captures torch's own attention functions in this thread; what was compiled runs as it was written.

        `forward` tells kinds of forwards apart. One whose calls all came from transformers' registry or from packages
        is not followed function by function again, but for one in `RECHECKED`: following costs as much as decoding.
        """
        depth = len(STATE.stack)
        is_needed = has_compiler() and not _STANCE
        eagerly = torch.compiler.set_stance("force_eager") if is_needed else contextlib.nullcontext()
        from regard.health.capture.torch_calls import TorchCalls, capture_replaced_sdpa

        since = self._unfollowed.get(forward)
        mode = TorchCalls() if self.follows_functions and (since is None or since >= RECHECKED) else None
        routed, light = self.routed, STATE.light
        needs_frames = mode is not None or since is None or self.needs_frames
        STATE.light = [] if needs_frames or any(one.observe is not None for one in ACTIVE) else [self.model]
        STATE.captures += 1
        try:
            with eagerly, mode or contextlib.nullcontext(), capture_replaced_sdpa():
                yield
        finally:
            self.saw_functions = mode is not None and mode.saw_attention
            if forward is not None and mode is None and since is not None:
                self._unfollowed[forward] = since + 1
            elif forward is not None and self.routed > routed and not self.saw_functions:
                self._unfollowed[forward] = 0
            else:
                self._unfollowed.pop(forward, None)
            STATE.light = light
            STATE.captures -= 1
            del STATE.stack[depth:]
            STATE.weights_depth = None
            forget_derived()

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Captures one forward of the model that begins now, in its pre-hook: see `open_scope`."""
        try:
            with _LOCK:
                self._start()
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
    if torch.compiler.is_compiling() or (STATE.light and module is not STATE.light[0]):
        return
    try:
        _enter(module, inputs, named)
    except Exception as error:
        say(error)


def _enter(module: nn.Module, inputs: tuple, named: dict | None) -> None:
    opener = next((one for one in ACTIVE[:] if one.in_every_forward and id(module) in one.names), None)
    if opener is not None:
        run_as_written()
        if module is opener.model:
            close_scopes(opener)  # of a forward that Ctrl-C ended
        if not STATE.scopes:
            kind = _kind_of_forward(module, inputs, named or {}) if module is opener.model else None
            open_scope(opener.torch_calls(kind), opener)
    if named and named.get("output_attentions") and STATE.weights_depth is None:
        STATE.weights_depth = len(STATE.stack)
    given = (*inputs, *named.values()) if named else inputs
    token = object() if is_given_tokens(given) else forward_token()
    STATE.stack.append(Frame(module, token, given))


def _kind_of_forward(module: nn.Module, inputs: tuple, named: dict) -> tuple:
    """Returns what tells forwards of a module apart that may take other code: modes, options, one token or several."""
    first = next((x for x in (*inputs, *named.values()) if isinstance(x, Tensor)), None)
    is_step = first is not None and first.ndim > 1 and first.shape[1] == 1
    options = frozenset(name for name, x in named.items() if x is not None and x is not False)
    way = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return id(module), module.training, torch.is_grad_enabled(), len(inputs), options, is_step, way


def _leave_forward(module: nn.Module, inputs: tuple, output: Any) -> None:
    if torch.compiler.is_compiling() or (STATE.light and (not STATE.stack or STATE.stack[-1][0] is not module)):
        return
    try:
        _leave(module)
    except Exception as error:
        say(error)
        STATE.stack.clear()  # what is still running is not captured
        with contextlib.suppress(Exception):
            close_scopes()


def _leave(module: nn.Module) -> None:
    if STATE.stack and STATE.stack[-1][0] is module:
        STATE.stack.pop()
    if STATE.weights_depth is not None and len(STATE.stack) <= STATE.weights_depth:
        STATE.weights_depth = None
    if not STATE.stack:
        forget_derived()
    if STATE.scopes and len(STATE.stack) <= STATE.scopes[-1][1]:
        close_scope(STATE.scopes[-1][0])


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
    swapped, run = call, Once(run_original)
    with uncaptured():
        for one in active:
            one.routed += 1
            if one.swap is not None:
                swapped = _swap(one, swapped)
        if swapped is not call:
            run = Once(partial(_run_swapped, swapped))
        if is_vmapped(call.q) or is_vmapped(call.k) or is_vmapped(call.v) or is_vmapped(call.mask):
            swapped = swapped.changed(obstacle=UNDER_VMAP)
        for one in reversed(active):  # the first observer is outermost
            if one.observe is not None:
                run = Once(partial(_observe, one, swapped, one.names[id(call.module)], run))
        return run()


def _swap(one: Interception, call: Call) -> Call:
    """Returns the call as a swap changes it; as it was if the swap fails."""
    try:
        return one.swap(call)  # type: ignore[misc]
    except Exception as error:
        if not is_ours(error):
            raise
        say(error)
        return call


def _observe(one: Interception, call: Call, name: str, run: Once) -> Tensor:
    """Returns the output that an observer returns; if it fails, the model's own, and the observer is told why."""
    try:
        return one.observe(call, name, run)  # type: ignore[misc]
    except Exception as error:
        if not is_ours(error):
            raise
        say(error)
        if call.obstacle is None:
            reason = f"regard failed on it: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            with contextlib.suppress(Exception):
                one.observe(call.changed(obstacle=reason), name, run)  # type: ignore[misc]
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


def report_gate(gates: Tensor) -> None:
    """Tells observers of the running module the σ(g) that it multiplies an output by, or may multiply it by."""
    module = running_module()
    for one in interceptions_of(module):
        add = getattr(one.observe, "add_gate", None)
        if add is not None:
            add(one.names[id(module)], gates)
