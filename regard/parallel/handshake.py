"""The handshake before every call: one all-gather of a few numbers checks that all ranks call alike, and correctly.

An error of one rank (an argument of the wrong shape) and a difference between ranks are raised on every rank, so that
none waits for a rank that has left.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard._call.mask.mask import Mask
from regard.parallel.group import RankGroup

NUMBERS = 48  # in every handshake, so that calls of different functions can be compared too
SKETCHED = 1 << 16  # entries of a tensor, at most, that a sketch projects
TEXT = 2000  # bytes of an error, at most


def compare_calls(
    group: RankGroup, what: str, numbers: Sequence[int], alike: Mapping[str, object], failure: Exception | None = None
) -> list[list[int]]:
    """Return every rank's numbers, or raise on every rank if their calls of the function `what` do not fit together.

    `numbers` may differ between ranks; `alike` may not, and its keys say how calls differ. `failure` is why this rank
    cannot take part: it is raised here and, as a ValueError, on the other ranks.
    """
    step = f"start of {what}"
    text = "" if failure is None else f"{type(failure).__name__}: {failure}".encode()[:TEXT].decode(errors="ignore")
    checksums = [zlib.crc32(repr(x).encode()) for x in alike.values()]
    mine = [zlib.crc32(step.encode()), len(text.encode()), *([] if failure is not None else (*numbers, *checksums))]
    everyone = group.all_gather_numbers(mine + [0] * (NUMBERS - len(mine)), step)
    others = [rank for rank, (other, *_) in enumerate(everyone) if other != mine[0]]
    if failure is None and others:
        raise ValueError(f"rank {others[0]} calls another function of regard.parallel than rank {group.rank}, {what}")
    failed = [(rank, size) for rank, (_, size, *_) in enumerate(everyone) if size]
    if failed and not others:
        rank, size = failed[0]
        text = group.broadcast_text(text, size, rank, step)
        if failure is None:
            raise ValueError(f"rank {rank} cannot take part: {text}")
    if failure is not None:
        raise failure
    count = 2 + len(numbers)
    for rank, theirs in enumerate(everyone):
        for how, other, first in zip(alike, theirs[count:], everyone[0][count:], strict=False):
            if other != first:
                raise ValueError(f"rank {rank} and rank 0 call {how}; every rank must pass the same")
    return [theirs[2:count] for theirs in everyone]


def summarize(x: object) -> object:
    """Return what of an argument must be the same on every rank.

    That is a tensor's dtype and number of dims, a policy's numbers, or the argument itself.
    """
    if isinstance(x, Tensor):
        return str(x.dtype), x.ndim
    if isinstance(x, Mask):  # the same on every rank, to the number
        tensors = [y for part in x.parts for y in vars(part).values() if isinstance(y, Tensor)]
        return repr(x), [y.tolist() for y in tensors]
    if isinstance(x, tuple):
        return tuple(map(summarize, x))
    if not callable(x):
        return x
    settings = {
        name: value for name, value in getattr(x, "__dict__", {}).items() if isinstance(value, (int, float, str, tuple))
    }
    learned = []
    if isinstance(x, torch.nn.Module):
        learned = [p.detach().double().flatten().tolist() for p in (*x.parameters(), *x.buffers())]
    return getattr(x, "__qualname__", type(x).__name__), sorted(settings.items()), learned


def sketch(x: Tensor) -> list[int]:
    """Return ‖x‖ and three projections of x as the bits of float64 numbers; equal x give nearly equal sketches."""
    flat = x.detach().double().flatten()
    first = flat[:SKETCHED]
    found = torch.cat([flat.norm()[None], _cosines(first.numel(), first.device) @ first])
    return [struct.unpack("q", struct.pack("d", value))[0] for value in found.tolist()]


@functools.lru_cache(maxsize=8)
def _cosines(size: int, device: torch.device) -> Tensor:
    """Return cos(i), cos(2i), cos(3i) [3, size]."""
    turns = torch.arange(1, 4, dtype=torch.float64, device=device)
    angles = torch.arange(size, dtype=torch.float64, device=device)
    return torch.cos(torch.outer(turns, angles))


def sketches_match(one: Sequence[int], other: Sequence[int]) -> bool:
    """True if two sketches differ by no more than two machines round differently."""
    a, b = (torch.tensor(x, dtype=torch.int64).view(torch.float64) for x in (one, other))
    tolerance = 1e-2 * float(a[0]) if bool(torch.isfinite(a[0])) else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)
