"""`count_batches`: a line that counts batches while they are taken, for terminals and notebooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any


def count_batches(batches: Iterable[Any], label: str = "examine") -> Iterator[Any]:
    """Yield the batches; write `examine: 3 of 8 batches, 2 s` to standard error, over itself each time.

    >>> from regard.health.progress import count_batches
    >>> list(count_batches("ab"))
    ['a', 'b']
    """
    total = f" of {len(batches)}" if isinstance(batches, Sized) else ""
    started = time.monotonic()
    try:
        for done, batch in enumerate(batches):
            seconds = time.monotonic() - started
            print(f"\r{label}: {done}{total} batches, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
            yield batch
    finally:
        print(f"\r{label}: done, {time.monotonic() - started:.0f} s".ljust(48), file=sys.stderr, flush=True)
