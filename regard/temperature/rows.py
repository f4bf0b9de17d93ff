"""What a policy may ask of an attention call: how many keys each query sees, its queries, its statistics at T = 1."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The rows of one call. `rows(("entropy",))` measures them with temperature 1, in one more pass."""

    q: Tensor  # [B, H, M, D], before the scale
    measure: Callable[[tuple[str, ...]], dict[str, Tensor]]

    def __call__(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        if torch.compiler.is_compiling():  # nobody looks on there
            return self.measure(names)
        before, _asking.now = _asking.now, True
        try:
            return self.measure(names)
        finally:
            _asking.now = before


class _Asking(threading.local):
    now = False


_asking = _Asking()


def asking() -> bool:
    """Is this thread within the pass that a policy measures with? Its weights are not those the model uses."""
    return _asking.now


def visible_keys(problem) -> Tensor:
    """[B, H, M]: how many keys each query of a problem sees, from the intervals alone where there is no dense mask."""
    batch, heads, queries = problem.q.shape[:3]
    keys, device = problem.k.shape[2], problem.q.device
    i = torch.arange(queries, device=device) + (problem.first_query - problem.first_key)
    left, right = problem.reach
    first = torch.zeros_like(i) if left is None else (i - left).clamp(0, keys)
    last = torch.full_like(i, keys) if right is None else (i + right + 1).clamp(0, keys)
    last = last.expand(batch, queries)
    if problem.key_lengths is not None:
        last = torch.minimum(last, problem.key_lengths.to(device)[:, None] - problem.first_key)
    if not queries or (problem.mask is None and problem.bias is None):
        count = (last - first).clamp_min(0)[:, None, :].expand(batch, heads, queries)
        return count.to(problem.accumulator)
    shown = []
    for q0 in range(0, queries, 256):  # a block of queries at a time: never N × N
        block = slice(q0, q0 + 256)
        j = torch.arange(keys, device=device)
        seen = (j >= first[block, None]) & (j < last[:, None, block, None])
        if problem.mask is not None:
            seen = seen & problem.mask[:, :, block]
        if problem.bias is not None:
            seen = seen & (problem.bias[:, :, block] != -math.inf)
        shown.append(seen.sum(-1).expand(batch, heads, seen.shape[-2]))
    return torch.cat(shown, -1).to(problem.accumulator)
