"""How many bytes this rank sends: counted where they leave, to be held against the formulas of docs/scale.md.

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
    """`by_step` tells the bytes of each kind of step: "ring forward", "ring backward", "tree", "newton", …

    Point-to-point messages count as sent. A collective (all-reduce, broadcast by its root) counts its payload once:
    what the backend's own algorithm makes of it is the backend's affair.
    """

    bytes: int = 0
    messages: int = 0
    by_step: Counter = field(default_factory=Counter)

    def add(self, step: str, size: int) -> None:
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


def sent(step: str, size: int) -> None:
    for traffic in _open:
        traffic.add(step, size)
