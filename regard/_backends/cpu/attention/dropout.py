"""Dropout of weights, or of their gradients, by the random words of `regard._call.philox`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.attention.blocks import Block, Blocks
from regard._backends.cpu.jit.compile import kernel, precision_of
from regard._call import philox
from regard._call.philox import KEY_A, KEY_B, ROUND_A, ROUND_B


def apply_dropout(blocks: Blocks, block: Block, s: Tensor) -> None:
    """s [g, rows, n] ← s / (1 − p) where the key is kept, else 0."""
    problem = blocks.problem
    if problem.dropout_p > 0.0:
        queries = blocks.queries if problem.queries is None else problem.queries  # of the whole sequence
        b, h, _ = block.first_row
        seed = np.uint64(int(problem.seed) & 0xFFFFFFFFFFFFFFFF)
        bound, factor = np.uint64(philox.threshold(problem.dropout_p)), 1.0 / (1.0 - problem.dropout_p)
        run = _dropout_kernel(problem.accumulator)
        run(block.as_matrix(s), block.geometry, (b * blocks.heads + h) * queries, queries, seed, bound, factor)


@functools.cache
def _dropout_kernel(dtype: torch.dtype) -> Callable:
    return kernel(drop_entries, {}, precision_of(dtype))


def drop_entries(s, geometry, base, queries, seed, bound, factor):
    """s ← factor·s where the random word of (seed, row, key) is at least `bound`, else 0."""
    for r in range(s.shape[0]):
        row = np.uint64(base + (r // geometry[1]) * queries + geometry[0] + r % geometry[1])
        x = s[r]
        for j in range(len(x)):
            x[j] = x[j] * factor if random_word(seed, row, np.uint64(geometry[2] + j)) >= bound else 0.0


def random_word(seed, row, key):
    """The first word of `regard._call.philox.words`."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = key, row & low, row >> half, np.uint64(0)
    k0, k1 = seed & low, seed >> half
    for _ in range(10):
        a, b = c0 * np.uint64(ROUND_A), c2 * np.uint64(ROUND_B)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(KEY_A)) & low, (k1 + np.uint64(KEY_B)) & low
    return c0
