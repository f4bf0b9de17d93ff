"""Which rank holds which positions of a sequence of length n, and `shard` and `unshard`.

    contiguous   rank r holds [n·r/W, n·(r+1)/W)
    balanced     the sequence is cut into 2W chunks, and rank r holds chunks r and 2W − 1 − r

Under causal order the query at position i sees i + 1 keys, so contiguous shards give the last rank about twice the
mean work. A front and a back chunk balance: r + (2W − 1 − r) is the same for all ranks.

>>> from regard.parallel.layout import spans
>>> spans(16, 2)
[[(0, 4), (12, 16)], [(4, 8), (8, 12)]]
>>> spans(5, 3, "contiguous")
[[(0, 1)], [(1, 3)], [(3, 5)]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from regard._core.dtensor import is_dtensor
from regard.parallel.group import Group, RankGroup
from regard.parallel.handshake import compare_calls

LAYOUTS = ("balanced", "contiguous")

Spans = list[tuple[int, int]]


def spans(length: int, world: int, layout: str = "balanced") -> list[Spans]:
    """Return every rank's positions as [start, stop) spans; chunks differ by at most one in length."""
    check_layout(layout)
    if layout == "contiguous":
        return [[(length * rank // world, length * (rank + 1) // world)] for rank in range(world)]
    cuts = [length * chunk // (2 * world) for chunk in range(2 * world + 1)]
    chunks = list(itertools.pairwise(cuts))
    return [[chunks[rank], chunks[2 * world - 1 - rank]] for rank in range(world)]


def spans_of_lengths(lengths: list[int], layout: str, name: str) -> list[Spans]:
    """Return every rank's spans for shards of these lengths."""
    if layout == "contiguous":
        starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
        return [[(start, start + length)] for start, length in zip(starts, lengths, strict=True)]
    cut = spans(sum(lengths), len(lengths), layout)
    for rank, (length, own) in enumerate(zip(lengths, cut, strict=True)):
        if length != count_positions(own):
            raise ValueError(
                f"{name}: rank {rank} holds {length} positions, but the {layout} layout of {sum(lengths)} over "
                f"{len(lengths)} ranks gives it {count_positions(own)}; cut with regard.parallel.shard, or pass "
                'layout="contiguous", which takes shards of any length'
            )
    return cut


def merge_spans(own: Spans) -> Spans:
    """Merge adjacent spans and drop empty ones (all but one)."""
    found: Spans = []
    for start, stop in own:
        if found and (found[-1][1] == start or start == stop):
            found[-1] = (found[-1][0], max(found[-1][1], stop)) if start != stop else found[-1]
        else:
            found.append((start, stop))
    return found


def locate_spans(own: Spans) -> Iterator[tuple[tuple[int, int], slice]]:
    """Yield each span with the slice of the shard that holds it."""
    at = 0
    for start, stop in own:
        yield (start, stop), slice(at, at + stop - start)
        at += stop - start


def count_positions(own: Spans) -> int:
    """Return how many positions the spans cover."""
    return sum(stop - start for start, stop in own)


def check_layout(layout: str) -> None:
    """Raise ValueError if the layout is unknown."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")


def shard(x: Tensor, dim: int = -2, group: Group = None, layout: str = "balanced") -> Tensor:
    """Return this rank's shard of a whole tensor: its chunks of dimension `dim`, concatenated.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> regard.parallel.shard(torch.arange(4), dim=0)
    tensor([0, 1, 2, 3])
    >>> torch.distributed.destroy_process_group()

    Args:
        x: the whole tensor, the same on every rank. Gradients flow to the rank's own positions.
        dim: the dimension that is cut: −2 for q, k, v of shape (…, length, head_dim), and for a mask's queries.
        group: the ranks that share the sequence; None is all of them.
        layout: "balanced" or "contiguous", as in `regard.parallel.attention`.

    Returns:
        This rank's positions of `x`, in order.

    Raises:
        TypeError: `x` is not a tensor, or is a DTensor.
        ValueError: `dim` or `layout` is unknown.
    """
    dim = _check_dim(x, dim)
    ranks = RankGroup.from_torch(group)
    own = spans(x.shape[dim], ranks.world, layout)[ranks.rank]
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in own], dim)


def unshard(x: Tensor, dim: int = -2, group: Group = None, layout: str = "balanced") -> Tensor:
    """Gather the whole tensor from every rank's shard, on every rank; the inverse of `shard`.

    Backward takes the rank's own positions of the gradient, so every rank must compute the same loss from the whole
    tensor.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> regard.parallel.unshard(torch.arange(4), dim=0)
    tensor([0, 1, 2, 3])
    >>> torch.distributed.destroy_process_group()

    Returns:
        The whole tensor, the same on every rank.

    Raises:
        TypeError: `x` is not a tensor, or is a DTensor.
        ValueError: The shards of the ranks do not fit together, or `dim` or `layout` is unknown.
        RankError: Another rank died or stalled.
    """
    ranks = RankGroup.from_torch(group)
    failure: Exception | None = None
    numbers: list[int] = []
    alike: dict[str, object] = {}
    try:
        check_layout(layout)
        dim = _check_dim(x, dim)
        numbers = [x.shape[dim]]
        alike = {"with different dims or layouts": (dim, layout), "with x of different dtypes": str(x.dtype)}
        alike["with x of different shapes (all but the length)"] = (*x.shape[:dim], *x.shape[dim + 1 :])
    except Exception as error:
        failure = error
    lengths = compare_calls(ranks, "unshard", numbers, alike, failure)
    return _Unshard.apply(x, dim, ranks, spans_of_lengths([n for (n,) in lengths], layout, "x"))


def _check_dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor) or is_dtensor(x):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be one of the {x.ndim} of x (shape {tuple(x.shape)}), got {dim}")
    return dim % x.ndim


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: RankGroup, cut: list[Spans]) -> Tensor:
        lengths = [count_positions(own) for own in cut]
        ctx.dim, ctx.own = dim, cut[group.rank]
        shape = list(x.shape)
        shards = []
        for rank, length in enumerate(lengths):
            shape[dim] = length
            shard = x.contiguous() if rank == group.rank else x.new_empty(shape)
            shards.append(group.broadcast(shard, rank, "unshard"))
        shape[dim] = sum(lengths)
        whole = x.new_empty(shape)
        for shard, own in zip(shards, cut, strict=True):
            for (start, stop), here in locate_spans(own):
                whole.narrow(dim, start, stop - start).copy_(shard.narrow(dim, here.start, stop - start))
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = [grad.narrow(ctx.dim, start, stop - start) for start, stop in ctx.own]
        return torch.cat(own, ctx.dim), None, None, None
