"""Forward hooks that torch.compile does not trace, and whether the forward that called one runs compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

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


def runs_compiled() -> bool:
    """True if a compiled forward called the hook: its attention calls can no longer be intercepted."""
    frame: FrameType | None = sys._getframe(1)
    wrappers = 0
    while frame is not None:
        if frame.f_code.co_name in WRAPPERS and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            wrappers += 1
        frame = frame.f_back
    return wrappers > 1  # one is that of `torch.compiler.disable` around the hook
