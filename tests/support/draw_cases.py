"""Draws which cases of a test run, by one seed for all processes: REGARD_SEED, which the end of the output names.

A test marked `@pytest.mark.drawn(3)` runs its first case and two others. REGARD_CASES=all runs every case.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable

import pytest


def choose_seed() -> None:
    """Choose the seed, before worker processes inherit it."""
    os.environ.setdefault("REGARD_SEED", str(random.SystemRandom().randrange(10**6)))


def draw_cases(items: Iterable[pytest.Item], count: Callable[[pytest.Item], int | None], seed: str) -> list:
    """The items that run: of each test function the first case and others, count(item) in all; None: every case."""
    functions: dict[str, list] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: list = []
    for name, cases in functions.items():
        most = count(cases[0])
        kept += cases if most is None else [cases[0], *draw(cases[1:], most - 1, f"{seed} {name}")]
    return kept


def draw(cases: list, most: int, seed: str) -> list:
    """`most` of the cases, in their order."""
    places = random.Random(seed).sample(range(len(cases)), min(most, len(cases)))
    return [cases[place] for place in sorted(places)]


def most_of(item: pytest.Item) -> int | None:
    """How many cases of a test run, by its mark; None: all."""
    mark = item.get_closest_marker("drawn")
    return None if mark is None or os.environ.get("REGARD_CASES") == "all" else mark.args[0]
