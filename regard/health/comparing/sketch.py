"""Small numbers that stand for large tensors: chosen tokens, and products with signs that a seed gives."""

from __future__ import annotations

from typing import Any

import numpy as np

TOKENS = 8  # that are chosen of each batch, at most
HEAD, HIDDEN = 8, 32  # products of each vector of a head, and of each hidden state
LARGE = 1e30  # in the place of ±∞


def signs(width: int, count: int) -> np.ndarray:
    """A matrix [width, count] of ±1, the same on every machine; column j does not depend on `count`.

    Entry (i, j) is the top bit of splitmix64(i·2³² + j).

    >>> from regard.health.comparing.sketch import signs
    >>> signs(3, 4)[:, :2].tolist() == signs(3, 2).tolist()
    True
    """
    z: Any = (np.arange(width, dtype=np.uint64)[:, None] << np.uint64(32)) + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.where(z >> np.uint64(63), 1.0, -1.0)


def sketch(x: np.ndarray, count: int) -> np.ndarray:
    """x […, D] as […, count] products with signs, over √D, and the norm as one more column; x itself if D ≤ count."""
    x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=LARGE, neginf=-LARGE), -LARGE, LARGE)
    width = x.shape[-1]
    if width <= count:
        return x.astype(np.float32)
    products = x @ signs(width, count) / np.sqrt(width)
    norm = np.sqrt(np.square(x).mean(-1, keepdims=True))
    return np.concatenate([products, norm], -1).astype(np.float32)


def choose_tokens(batch: int, length: int, real: np.ndarray | None = None) -> list[tuple[int, int]]:
    """(sequence, place) of up to eight tokens that are not padding: most of the first sequence, the others' last.

    A shorter list is a beginning of a longer one.

    >>> from regard.health.comparing.sketch import choose_tokens
    >>> choose_tokens(1, 10)[:3]
    [(0, 9), (0, 5), (0, 0)]
    """
    found: list[list[tuple[int, int]]] = []
    for b in range(min(batch, 4)):
        shown = np.arange(length) if real is None else np.flatnonzero(real[b])
        n = len(shown)
        wanted = dict.fromkeys(at for at in (n - 1, n // 2, 0, 1, n // 4, 3 * n // 4, n - 2, 2) if 0 <= at < n)
        found.append([(b, int(shown[at])) for at in wanted])
    ends = [row.pop(0) for row in found[1:] if row]
    first = found[0] if found else []
    mixed = [one for pair in zip(first[: len(ends)], ends, strict=False) for one in pair]
    rest = [one for row in (first[len(ends) :], *found[1:]) for one in row]
    return [*mixed, *ends[len(first) :], *rest][:TOKENS]
