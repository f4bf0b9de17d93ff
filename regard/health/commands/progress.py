"""A progress bar in a terminal, nothing in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def show_progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """`with show_progress("examining", 8) as advance: advance(3)` shows 3 of 8 on standard error; None: unknown."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
