"""A failure of ours inside somebody's forward: said once with its place, and the call runs as if we were not there.

What must come through carries a mark: the model's own errors, and those of what the user asked for (`Refused`, and
errors in a swapped call, which is the model's computation then).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger("regard")  # a warning could be an error, and reach the forward
_said: set[str] = set()


class Refused(ValueError):
    """What the user asked for cannot be done here."""

    passes_regard = True


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """Marks what is raised inside as none of our failures."""
    try:
        yield
    except Exception as error:
        error.passes_regard = True  # type: ignore[attr-defined]
        raise


def is_ours(error: BaseException) -> bool:
    """True if an error is a failure of ours, which must not reach the forward."""
    return not getattr(error, "passes_regard", False)


def say(error: BaseException) -> None:
    """Logs a failure of ours, once for each place."""
    last, ours = error.__traceback__, None
    while last is not None:
        code = last.tb_frame.f_code
        if "regard" in code.co_filename:
            ours = f"{code.co_filename.rpartition('/')[2]}:{last.tb_lineno}"
        last = last.tb_next
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if (key := f"{ours} {type(error).__name__}") not in _said:
        _said.add(key)
        _log.warning("regard failed at %s (%s); the model's call ran as if regard were not there", ours, text)


class Once:
    """A function that runs once at most; later calls return what the first returned. Its errors are marked."""

    def __init__(self, run: Callable[[], T]) -> None:
        self.run, self.results = run, []  # type: ignore[var-annotated]

    def __call__(self) -> Any:
        if not self.results:
            try:
                self.results.append(self.run())
            except Exception as error:  # as `passing` marks them, which takes as long as a small attention
                error.passes_regard = True  # type: ignore[attr-defined]
                raise
        return self.results[0]


def guarded(ours: Callable[[Callable[[], T]], T], run: Callable[[], T]) -> T:
    """Returns ours(run) or, if that fails, what `run` returns; `run` is not run twice.

    >>> from regard.health.capture.guard import guarded
    >>> guarded(lambda run: run() + 1 / 0, lambda: 2)
    2
    """
    once = Once(run)
    try:
        return ours(once)
    except Exception as error:
        if not is_ours(error):
            raise
        result = once()
        say(error)
        return result
