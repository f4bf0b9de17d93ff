"""Reduces the largest logits over ranks, which may run other layers (layer drop) in another order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.health.measurement.side_stream import HostCopies

Shapes = dict[str, tuple[int, int]]  # layer -> query heads and their width


class RankReduction:
    """Takes the maximum over ranks in one collective over every layer that any rank has seen.

    The ranks exchange the list of layers while it is empty, and again after a call in which one of them met a new
    layer: a flag for that travels with the logits and is read at the next call, so that no rank waits for its GPU.
    """

    def __init__(self) -> None:
        self.agreed: Shapes = {}
        self._met_new_layer = False
        self._copies = HostCopies()  # of the flag

    def reduce(
        self, found: Mapping[str, Tensor], shapes: Shapes, group: Any, device: torch.device
    ) -> tuple[dict[str, Tensor], set[str]]:
        """Returns layer → [H], the same on every rank, and the layers of `found` that wait for the next call.

        `found`: the logits of this rank; `shapes`: of all layers it has ever seen, to which others' are added.
        """
        self._copies.finish()
        if self._met_new_layer or not self.agreed:
            self._exchange_layers(shapes, group)
        if not self.agreed:
            return {}, set()
        late = {name for name in found if self.agreed.get(name) != shapes[name]}
        device = next((largest.device for largest in found.values()), device)
        parts = [torch.full((1,), float(bool(late)), device=device)]  # no copy from the host to wait for
        for name, (heads, _) in self.agreed.items():
            seen = name in found and name not in late
            parts.append(found[name].to(device) if seen else torch.full((heads,), -math.inf, device=device))
        joined = torch.cat(parts)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        flag, *parts = joined.split([1, *(heads for heads, _ in self.agreed.values())])
        self._copies.add(flag, self._receive_flag)
        self._copies.start()
        reduced = zip(self.agreed, parts, strict=True)
        return {name: largest for name, largest in reduced if self.agreed[name] == shapes[name]}, late

    def _receive_flag(self, flag: Tensor) -> None:
        self._met_new_layer |= bool(flag > 0)

    def _exchange_layers(self, shapes: Shapes, group: Any) -> None:
        gathered: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, shapes, group=group)
        self.agreed, self._met_new_layer = dict(sorted(item for one in gathered for item in one.items())), False
        shapes.update({name: shape for name, shape in self.agreed.items() if name not in shapes})
