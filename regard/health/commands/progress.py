"""A bar in a terminal, silence in a pipe."""

from __future__ import annotations

import contextlib
import sys


@contextlib.contextmanager
def counting(what: str, total: int | None):
    """`with counting("examining", 8) as advance: advance(3)` shows 3 of 8 done, on standard error; None: of any."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
