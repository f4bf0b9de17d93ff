"""`counted` counts the bytes that this rank sends, to be compared with the formulas of docs/developers/parallel.md.

>>> from regard.parallel import traffic
>>> with traffic.counted() as sent:
...     pass
>>> sent.bytes, sent.messages
(0, 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes and messages sent; `by_step` has the bytes of each kind of step: "ring forward", "tree", …

    Point-to-point messages count as sent. A collective (all-reduce, broadcast by its root) counts its payload once,
    whatever algorithm the backend uses for it.
    """

    bytes: int = 0
    messages: int = 0
    by_step: Counter = field(default_factory=Counter)

    def add(self, step: str, size: int) -> None:
        """Count one message of `size` bytes."""
        self.bytes += size
        self.messages += 1
        self.by_step[step] += size


_open: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what this process sends through `regard.parallel` inside the block."""
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)


def record(step: str, size: int) -> None:
    """Add one sent message to every open count."""
    for traffic in _open:
        traffic.add(step, size)
