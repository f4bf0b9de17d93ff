"""Before anything travels: do all ranks call alike, and rightly? One all-gather of a few numbers says so.

What one rank cannot do (an argument of the wrong shape) is told to all, so that every rank raises and none waits for a
rank that has left; and so is what differs between them.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard.parallel.group import Line

NUMBERS = 48  # that every call tells, so that calls of different functions meet too
SKETCHED = 1 << 16  # numbers of a tensor, at most, that are projected
TEXT = 2000  # bytes of an error, at most


def agree(
    line: Line, what: str, numbers: Sequence[int], alike: Mapping[str, object], failure: Exception | None = None
) -> list[list[int]]:
    """Every rank's numbers.

    alike: what must be the same on every rank, under the words that say how they differ if it is not.
    failure: why this rank cannot take part; its numbers do not count then. It is raised here, and told to the others.
    """
    step = f"start of {what}"
    text = "" if failure is None else f"{type(failure).__name__}: {failure}".encode()[:TEXT].decode(errors="ignore")
    marks = [zlib.crc32(repr(x).encode()) for x in alike.values()]
    mine = [zlib.crc32(step.encode()), len(text.encode()), *([] if failure is not None else (*numbers, *marks))]
    told = line.all_gather_numbers(mine + [0] * (NUMBERS - len(mine)), step)
    others = [rank for rank, (other, *_) in enumerate(told) if other != mine[0]]
    if failure is None and others:
        raise ValueError(f"rank {others[0]} calls another function of regard.parallel than rank {line.rank}, {what}")
    failed = [(rank, size) for rank, (_, size, *_) in enumerate(told) if size]
    if failed and not others:
        rank, size = failed[0]
        text = line.text(text, size, rank, step)
        if failure is None:
            raise ValueError(f"rank {rank} cannot take part: {text}")
    if failure is not None:
        raise failure
    count = 2 + len(numbers)
    for rank, theirs in enumerate(told):
        for how, other, first in zip(alike, theirs[count:], told[0][count:], strict=False):
            if other != first:
                raise ValueError(f"rank {rank} and rank 0 call {how}; every rank must pass the same")
    return [theirs[2:count] for theirs in told]


def kind(x):
    """What of an argument must be the same on every rank: a tensor's dtype and dims, a policy's numbers, or itself."""
    if isinstance(x, Tensor):
        return str(x.dtype), x.ndim
    if not callable(x):
        return x
    plain = {
        name: value for name, value in getattr(x, "__dict__", {}).items() if isinstance(value, (int, float, str, tuple))
    }
    learned = []
    if isinstance(x, torch.nn.Module):
        learned = [p.detach().double().flatten().tolist() for p in (*x.parameters(), *x.buffers())]
    return getattr(x, "__qualname__", type(x).__name__), sorted(plain.items()), learned


def sketch(x: Tensor) -> list[int]:
    """‖x‖ and three projections of x, as the bits of float64 numbers: equal x give nearly equal ones, others do not."""
    flat = x.detach().double().flatten()
    first = flat[:SKETCHED]
    found = torch.cat([flat.norm()[None], _waves(first.numel(), first.device) @ first])
    return [struct.unpack("q", struct.pack("d", value))[0] for value in found.tolist()]


@functools.lru_cache(maxsize=8)
def _waves(size: int, device: torch.device) -> Tensor:
    """cos(i), cos(2i), cos(3i) [3, size]."""
    turns = torch.arange(1, 4, dtype=torch.float64, device=device)
    angles = torch.arange(size, dtype=torch.float64, device=device)
    return torch.cos(torch.outer(turns, angles))


def alike_sketches(one: Sequence[int], other: Sequence[int]) -> bool:
    """Do the sketches differ by no more than what rounds differently on two machines?"""
    a, b = (torch.tensor(x, dtype=torch.int64).view(torch.float64) for x in (one, other))
    close = 1e-2 * float(a[0]) if bool(torch.isfinite(a[0])) else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=close, equal_nan=True)
