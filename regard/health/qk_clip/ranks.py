"""The largest logits that any rank saw: ranks may run other layers (layer drop), and in another order."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

Shapes = dict[str, tuple[int, int]]  # layer -> query heads and their width


class Ranks:
    """What ranks tell each other has one form on all of them: every layer that any has seen, by name.

    Which those are they ask while they know of none, and again after a call in which one of them met another: that call
    told so by one column more, which is read at the next.
    """

    def __init__(self) -> None:
        self.agreed: Shapes = {}
        self._news: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._met_another = False

    def was_blind(self) -> bool:
        """Did one rank miss attention at the last call, and none see any? All say the same; once."""
        if self._news is None:
            return False
        (met_another, blind, seeing), self._news = _read(*self._news), None
        self._met_another |= met_another
        return blind and not seeing

    def largest(
        self, found: Mapping[str, Tensor], shapes: Shapes, group, device: torch.device, blind: bool
    ) -> tuple[dict[str, Tensor], set[str]]:
        """Layer → [3, H], the same on every rank, and the layers found here that have to wait for the next call.

        `found`: the same of this rank alone; `shapes`: of all layers it has ever seen, to which others' are added;
        `blind`: is attention missed here?
        """
        if self._met_another or not self.agreed:
            self._agree(shapes, group)
        if not self.agreed:
            return {}, set()
        late = {name for name in found if self.agreed.get(name) != shapes[name]}
        device = next((numbers.device for numbers in found.values()), device)
        news = [torch.full((1, 1), float(told), device=device) for told in (bool(late), blind, bool(found))]
        columns = [torch.cat(news)]
        for name, (heads, _) in self.agreed.items():
            seen = name in found and name not in late
            columns.append(found[name].to(device) if seen else _nothing(heads, device))
        joined = torch.cat(columns, 1)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        first, *parts = joined.split([1, *(heads for heads, _ in self.agreed.values())], 1)
        self._news = _leaving(first[:, 0])
        everyones = zip(self.agreed, parts, strict=True)
        return {name: numbers for name, numbers in everyones if self.agreed[name] == shapes[name]}, late

    def _agree(self, shapes: Shapes, group) -> None:
        said: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, shapes, group=group)
        self.agreed, self._met_another = dict(sorted(item for one in said for item in one.items())), False
        shapes.update({name: shape for name, shape in self.agreed.items() if name not in shapes})


def _nothing(heads: int, device: torch.device) -> Tensor:
    """Of heads that were not seen: no logit, and nothing known against them."""
    numbers = torch.zeros(3, heads, device=device)
    numbers[0] = -math.inf
    return numbers


def _leaving(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """x on its way to the CPU, and when it is there: long before what a GPU is given after it is done."""
    if x.device.type != "cuda":
        return x, None
    there = torch.cuda.Event()
    landing = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    there.record(torch.cuda.current_stream(x.device))
    return landing, there


def _read(x: Tensor, there: torch.cuda.Event | None) -> list[bool]:
    if there is not None:
        there.synchronize()
    return [number > 0 for number in x.tolist()]
