"""Hooks on a model in training, which torch.compile does not trace, and interceptions of single forwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from regard.health.capture.interception import Interception, close_scope, open_scope

WRAPPERS = ("_fn", "compile_wrapper")  # torch's frames around compiled functions, and around disabled ones


class Hook:
    """A hook that torch.compile does not trace; in a copy of the model, or a saved one, it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call: Callable[..., None] | None = torch.compiler.disable(call)

    def __call__(self, *args: Any) -> None:
        if self.call is not None:
            self.call(*args)

    def __getstate__(self) -> dict[str, None]:
        return {"call": None}


class ForwardInterceptions:
    """Intercepts single forwards of a model, and follows torch's functions only where that has found attention.

    Following them takes a Python call per torch function. It is done in the first forward and in every `EVERY`-th, and
    in all if the last one that did met a function that may be attention, or no attention at all (layer drop).
    """

    EVERY = 20

    def __init__(self) -> None:
        self._made, self._is_needed = 0, True
        self._open: tuple[Interception, contextlib.AbstractContextManager] | None = None

    def open(self, model: nn.Module, observe: Callable) -> None:
        """Intercepts the forward that begins now; called in the model's pre-hook."""
        self.close(succeeded=False)
        follows = self._is_needed or self._made % self.EVERY == 0
        self._made += 1
        interception = Interception(model, observe=observe, follows_functions=follows)
        context = interception.in_forward()
        open_scope(context)
        self._open = interception, context

    def close(self, succeeded: bool) -> None:
        """Ends the interception that is open, if any, and learns from a forward that succeeded.

        A forward that Ctrl-C ends calls no hook: the next one closes it.
        """
        if self._open is None:
            return
        (interception, context), self._open = self._open, None
        close_scope(context)
        if succeeded and interception.follows_functions:
            self._is_needed = interception.saw_functions or not interception.routed


def runs_compiled() -> bool:
    """True if a compiled forward called the hook: its attention calls can no longer be intercepted."""
    frame: FrameType | None = sys._getframe(1)
    wrappers = 0
    while frame is not None:
        if frame.f_code.co_name in WRAPPERS and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            wrappers += 1
        frame = frame.f_back
    return wrappers > 1  # one is that of `torch.compiler.disable` around the hook
