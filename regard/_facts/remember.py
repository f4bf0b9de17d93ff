"""`remember`: keeps a value in a bounded cache, from which the oldest entry goes first."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


def remember(cache: dict, key: Hashable, value: Any, most: int) -> Any:
    """Keep `value`, and of all entries the latest `most`; returns the value.

    >>> cache = {}
    >>> [remember(cache, key, key, 2) for key in "abc"], list(cache)
    (['a', 'b', 'c'], ['b', 'c'])
    """
    while len(cache) >= most and key not in cache:
        cache.pop(next(iter(cache), None), None)  # another thread may have been faster
    cache[key] = value
    return value
