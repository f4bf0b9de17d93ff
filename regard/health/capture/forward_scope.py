"""What a forward opens stays open until that forward ends, however it ends.

A module's pre-hook opens a context, its forward hook closes it. Ctrl-C ends a forward without any hook: its frame is on
no stack any more then, and whoever opens or closes something next closes what it left.
"""

from __future__ import annotations

import contextlib
import sys
from collections import UserList
from types import FrameType
from typing import Any

from regard.health.capture.threads import PerThread

OPENED: UserList[tuple[FrameType | None, Any]] = PerThread()  # forwards that opened something: the frame, the context


def open_forward(context: contextlib.AbstractContextManager) -> None:
    """Called by a module's forward pre-hook: what the context opens stays open until that forward ends."""
    bury_dead()
    context.__enter__()
    OPENED.append((_caller(), context))


def close_forward() -> None:
    """Called by a module's forward hook: close what its pre-hooks opened, one call for each, the last opened first."""
    if OPENED and OPENED[-1][0] is _caller():
        OPENED.pop()[1].__exit__(None, None, None)


def close_context(context: contextlib.AbstractContextManager) -> None:
    """Close what a forward opened, if it is still open."""
    bury_dead()
    for entry in [entry for entry in OPENED if entry[1] is context]:
        OPENED.remove(entry)
        context.__exit__(None, None, None)


def bury_dead() -> None:
    """Close what forwards left open that Ctrl-C ended: torch calls no hook then."""
    while OPENED and not _running(OPENED[-1][0]):
        OPENED.pop()[1].__exit__(None, None, None)


def _running(wanted: FrameType | None) -> bool:
    """Is a frame on any thread's stack?"""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None and at is not wanted:
            at = at.f_back
        if at is not None:
            return True
    return False


def _caller() -> FrameType | None:
    """The frame of the module's call that runs the hook which asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame
