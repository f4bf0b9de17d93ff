"""Hooks on a model in training, of which a compiled graph holds nothing, and interceptions of single forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.health.capture.forwards import close_scope, open_scope
from regard.health.capture.interception import Interception


class Hook:
    """A hook that does nothing while torch.compile traces, and in a copy of the model, or a saved one."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call: Callable[..., None] | None = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling() and self.call is not None:
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
