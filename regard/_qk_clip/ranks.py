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
    told so by one number more, which is read at the next, when nothing waits for it.
    """

    def __init__(self) -> None:
        self.agreed: Shapes = {}
        self._news: Tensor | None = None

    def largest(
        self, found: Mapping[str, Tensor], shapes: Shapes, group, device: torch.device
    ) -> tuple[dict[str, Tensor], set[str]]:
        """Layer → [3, H], the same on every rank, and the layers found here that have to wait for the next call.

        `found`: the same of this rank alone; `shapes`: of all layers it has ever seen, to which others' are added.
        """
        if not self.agreed or (self._news is not None and bool(self._news > 0)):
            self._agree(shapes, group)
        if not self.agreed:
            return {}, set()
        late = {name for name in found if self.agreed.get(name) != shapes[name]}
        device = next((numbers.device for numbers in found.values()), device)
        columns = [torch.full((3, 1), float(bool(late)), device=device)]
        for name, (heads, _) in self.agreed.items():
            seen = name in found and name not in late
            columns.append(found[name].to(device) if seen else _nothing(heads, device))
        joined = torch.cat(columns, 1)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        self._news, *parts = joined.split([1, *(heads for heads, _ in self.agreed.values())], 1)
        self._news = self._news[0, 0]
        return dict(zip(self.agreed, parts, strict=True)), late

    def _agree(self, shapes: Shapes, group) -> None:
        said: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, shapes, group=group)
        self.agreed = dict(sorted(item for one in said for item in one.items()))
        shapes.update({name: shape for name, shape in self.agreed.items() if name not in shapes})


def _nothing(heads: int, device: torch.device) -> Tensor:
    """Of heads that were not seen: no logit, and nothing known against them."""
    numbers = torch.zeros(3, heads, device=device)
    numbers[0] = -math.inf
    return numbers
