"""`counted` counts the bytes that this rank sends, to be compared with the formulas of docs/developers/parallel.md.

Point-to-point messages count as sent. A collective counts its payload once, whatever algorithm the backend uses for it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from regard.parallel.group import RankGroup

SENDS: dict[str, Callable[[int, int], bool]] = {  # method -> does this rank send, given the root's rank?
    "send_receive": lambda rank, root: True,
    "all_reduce": lambda rank, root: True,
    "start_broadcast": lambda rank, root: rank == root,
    "reduce": lambda rank, root: rank != root,
}


@dataclass
class Traffic:
    """Messages sent, and the bytes of each kind of step: "ring forward", "tree", "newton", …"""

    messages: int = 0
    by_step: Counter = field(default_factory=Counter)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Counts what this process sends through `regard.parallel` inside the block."""
    traffic = Traffic()
    watched = {name: _counting(traffic, getattr(RankGroup, name), sends) for name, sends in SENDS.items()}
    with mock.patch.multiple(RankGroup, **watched):
        yield traffic


def _counting(traffic: Traffic, method: Callable, sends: Callable[[int, int], bool]) -> Callable:
    signature = inspect.signature(method)

    def call(group, *args, **kwargs):
        given = signature.bind(group, *args, **kwargs).arguments
        x = given.get("sent", given.get("x"))
        if x is not None and x.numel() and group.world > 1 and sends(group.rank, given.get("root", 0)):
            traffic.messages += 1
            traffic.by_step[given["step"]] += x.numel() * x.element_size()
        return method(group, *args, **kwargs)

    return call
