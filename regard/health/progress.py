"""`Progress`: a line on standard error that tells every second what is being done, and about how long it will take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from regard.health.checks import rules

EVERY = 0.5  # seconds between two lines
WIDTH = 79  # columns that a line covers


class Budget:
    """Seconds of this thread's own time, and up to `patience` times as many by the clock, where others keep it waiting.

    >>> from regard.health.progress import Budget
    >>> Budget(5.0).is_spent, Budget(0.0).is_spent
    (False, True)
    """

    def __init__(self, seconds: float, patience: float = 3.0) -> None:
        self.seconds, self.patience = seconds, patience
        self.own, self.clock = time.thread_time(), time.perf_counter()

    @property
    def is_spent(self) -> bool:
        own, clock = time.thread_time() - self.own, time.perf_counter() - self.clock
        return own > self.seconds or clock > self.patience * self.seconds or self.seconds <= 0.0


class Progress:
    """A line that is written over itself until the `with` block ends; a thread keeps the seconds moving.

    >>> from regard.health.progress import Progress
    >>> with Progress("examine") as progress:
    ...     list(progress.count("ab"))
    ['a', 'b']
    """

    def __init__(self, command: str) -> None:
        self.command, self.text, self.detail, self.done, self.total = command, "starting", "", 0, 0
        self.started = self.since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="regard-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._write("")

    def stage(self, text: str, detail: str = "", done: int = 0, total: int = 0) -> None:
        """Says what begins now: number `done` (from 0) of `total` steps of one stage; `total` 0 for a single step."""
        if done == 0:
            self.since = time.monotonic()
        self.text, self.detail, self.done, self.total = text, detail, done, total
        self._write(self.line())

    def check(self, code: str, number: int, total: int) -> None:
        """Says which check begins, as `run_checks` calls it; behind the last come changes and ablation."""
        rule = rules().get(code)
        if rule is not None:
            self.stage(f"checking {number + 1} of {total}", rule.title, number, total)
        else:
            self.stage(code)

    def count(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches and says which one is measured."""
        total = len(batches) if isinstance(batches, Sized) else 0
        for done, batch in enumerate(batches):
            of = f" of {total}" if total else ""
            self.stage(f"measuring batch {done + 1}{of}", "" if done else "the first compiles, once", done, total)
            yield batch

    def line(self) -> str:
        """`examine: checking 7 of 31 · 12 s, about 20 s left · steps with a cache give what one forward gives`."""
        now = time.monotonic()
        left = (now - self.since) / self.done * (self.total - self.done) if self.done and self.total else 0.0
        rest = f", about {left:.0f} s left" if left >= 1.0 else ""
        text = f"{self.command}: {self.text} · {now - self.started:.0f} s{rest}"
        return f"{text} · {self.detail}" if self.detail else text

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            self._write(self.line())

    def _write(self, text: str) -> None:
        try:
            print(f"\r{text[:WIDTH]:<{WIDTH}}{'' if text else chr(13)}", end="", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # standard error is closed
            self._ended.set()
