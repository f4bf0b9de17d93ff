"""What this thread runs: forwards of hooked modules, contexts that were opened in them, and who called this code.

A forward that was given tokens begins a new one of the whole model; the modules within share its token.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

PLACES = (f"{torch.__path__[0]}/", __file__.rpartition("health")[0])  # files of torch and of regard
NOTHING = contextlib.nullcontext()


def as_written(model: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` was given, where `model` is what it returned."""
    return getattr(model, "_orig_mod", model)


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
        self.sdpa_calls = 0  # of torch's own function, seen by a mode
        self.light: list[nn.Module] = []  # whose forward runs without frames of its parts: see `torch_calls`
        self.multi_head: dict | None = None  # passed by a multi-head call to the sdpa call inside it


STATE = ThreadState()


def running_module() -> nn.Module | None:
    """Returns the innermost hooked module whose forward runs in this thread."""
    return STATE.stack[-1][0] if STATE.stack else None


def running_frame() -> Frame | None:
    """Returns the innermost running forward in this thread."""
    return STATE.stack[-1] if STATE.stack else None


def forward_token() -> Any:
    """Returns an object that identifies the innermost running forward that was given tokens."""
    return STATE.stack[-1][1] if STATE.stack else None


def is_given_tokens(given: tuple) -> bool:
    """True if the first tensor that a module is given holds integers: there a new forward begins.

    >>> from regard.health.capture.forwards import is_given_tokens
    >>> is_given_tokens((torch.arange(4),)), is_given_tokens((torch.randn(4, 8), torch.arange(4)))
    (True, False)
    """
    for x in given:
        if isinstance(x, Tensor):
            return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return False


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


class uncaptured:
    """Captures nothing of what the body calls in this thread."""

    def __enter__(self) -> None:
        self.mode = without_mode()
        self.mode.__enter__()
        self.before, STATE.busy = STATE.busy, True

    def __exit__(self, *error: Any) -> None:
        STATE.busy = self.before
        self.mode.__exit__(*error)


def without_mode() -> contextlib.AbstractContextManager:
    """Pops our function mode where it is the innermost one: torch calls are cheaper without it."""
    depth = torch._C._len_torch_function_stack()
    is_ours = depth and getattr(torch._C._get_function_stack_at(depth - 1), "captures_attention", False)
    return _pop_mode_temporarily() if is_ours else NOTHING


def find_caller() -> tuple[FrameType, int]:
    """Returns the innermost frame of code that is neither torch's nor regard's, and its distance from the caller."""
    frame, distance = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PLACES):
        frame, distance = frame.f_back, distance + 1
    return frame, distance
