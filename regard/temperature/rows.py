"""`Rows` and `visible_keys`: what a policy can use of an attention call."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._call.problem import Problem


class Rows(NamedTuple):
    """The rows of one call; `rows(("entropy",))` measures statistics at temperature 1, in one more pass."""

    q: Tensor  # [B, H, M, D], before the scale
    measure: Callable[[tuple[str, ...]], dict[str, Tensor]]

    def __call__(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        if torch.compiler.is_compiling():  # captures do not run there
            return self.measure(names)
        before = _measuring.set(True)
        try:
            return self.measure(names)
        finally:
            _measuring.reset(before)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is an int ≥ 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int ≥ 1, got {size!r}")


def check_queries(policy: object, q: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless q [B, H, M, D] has the heads and the width of a policy's weight [H, D]."""
    heads, head_dim = weight.shape
    if (q.shape[-3], q.shape[-1]) != (heads, head_dim):
        raise ValueError(
            f"{type(policy).__name__}(heads={heads}, head_dim={head_dim}) got queries of {q.shape[-3]} heads of width "
            f"{q.shape[-1]}; pass those sizes"
        )


_measuring = ContextVar("measuring", default=False)


def is_measuring() -> bool:
    """True during a policy's own measuring pass in this thread, whose weights the model does not use."""
    return _measuring.get()


def visible_keys(problem: Problem) -> Tensor:
    """Return how many keys each query of a problem sees [B, H, M], from the intervals if there is no dense mask."""
    batch, heads, queries = problem.q.shape[:3]
    keys, device = problem.k.shape[2], problem.q.device
    place = queries, keys, problem.first_query - problem.first_key, problem.reach, device
    if all(x is None for x in (problem.mask, problem.bias, problem.key_lengths, problem.interval)):
        records = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        transforms = torch._C._functorch.peek_interpreter_stack() is not None
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_own = records or transforms or captures or torch.is_inference_mode_enabled()  # a tensor of this call alone
        count = _count_in_reach if is_own else _count_once
        return count(problem.accumulator, *place).expand(batch, heads, queries).clone()  # a policy may write to it
    first, last = _find_reach(*place)
    last = last.expand(batch, 1, queries)
    if problem.key_lengths is not None:
        last = torch.minimum(last, problem.key_lengths.to(device)[:, None, None] - problem.first_key)
    if problem.interval is not None:
        lo, hi, _ = problem.interval - problem.first_key
        first, last = torch.maximum(first, lo), torch.minimum(last, hi)
    if not queries or (problem.mask is None and problem.bias is None):
        return (last - first).clamp_min(0).expand(batch, heads, queries).to(problem.accumulator)
    counts = []
    for q0 in range(0, queries, 256):  # by blocks, so that no N × N mask is built
        block = slice(q0, q0 + 256)
        j = torch.arange(keys, device=device)
        visible = (j >= first[..., block, None]) & (j < last[..., block, None])
        if problem.mask is not None:
            visible = visible & problem.mask[:, :, block]
        if problem.bias is not None:
            visible = visible & (problem.bias[:, :, block] != -math.inf)
        counts.append(visible.sum(-1).expand(batch, heads, visible.shape[-2]))
    return torch.cat(counts, -1).to(problem.accumulator)


def _find_reach(
    queries: int, keys: int, first_query: int, reach: tuple[int | None, int | None], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first key, and the one after the last, that causal order and window leave each query, [M]."""
    i = torch.arange(queries, device=device) + first_query
    left, right = reach
    first = torch.zeros_like(i) if left is None else (i - left).clamp(0, keys)
    return first, torch.full_like(i, keys) if right is None else (i + right + 1).clamp(0, keys)


def _count_in_reach(dtype: torch.dtype, *place: Any) -> Tensor:
    """Return how many keys are in each query's reach, [M]; `place` are the arguments of `_find_reach`."""
    first, last = _find_reach(*place)
    return (last - first).clamp_min(0).to(dtype)


_count_once = lru_cache(maxsize=32)(_count_in_reach)  # for the layers of a model, which ask alike
