"""What the values of a head leave its weights to decide: how far apart they lie within a sequence, and their size,

    apart_h = max (max_j v_j − min_j v_j),    size_h = max |v|,    over sequences and channels,

and which heads nothing behind the attention reads: their columns of the output projection are 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.health.measurement.side_stream import landed
from regard.nn.projections import output_weight

if TYPE_CHECKING:
    from regard.health.measurement.recorder import Layer

Ends = tuple[Tensor, Tensor]  # the least and the largest value over the keys, [B, G, E] each
SAMPLED = 1024  # keys whose values are looked at, at least
NOTHING = 1e-6  # of the layer's largest column: what counts as 0


def ends(v: Tensor) -> Ends:
    """Of values [B, G, N, E]; nothing waits."""
    v = v.detach()[:, :, :: max(1, v.shape[2] // SAMPLED)]
    return v.amin(2), v.amax(2)  # on a CPU torch's aminmax takes 3 to 15 times as long


def spans(seen: Sequence[Sequence[Ends]], heads: Sequence[int]) -> list[list[tuple[float, float]]]:
    """Per layer and query head (apart, size), over its calls, whose ends these are.

    Where all are of one kind they are told together, with one wait for the device.

    >>> from regard.health.measurement.value_spread import ends, spans
    >>> v = torch.tensor([[0.0, 5.0, 2.0], [1.0, 1.0, 1.0]])[None, :, :, None]  # two heads of three keys
    >>> spans([[ends(v)]], heads=[4])
    [[(5.0, 5.0), (5.0, 5.0), (0.0, 1.0), (0.0, 1.0)]]
    """
    calls = list(chain.from_iterable(seen))
    alike = len({(low.device, low.dtype, low.shape) for low, _ in calls}) == 1
    told = iter([pair for group in ([calls] if alike else [[call] for call in calls]) for pair in _told(group)])
    found = []
    for pairs, count in zip(seen, heads, strict=True):
        per_call = [next(told) for _ in pairs]
        groups = [
            (max(apart), max(size))
            for apart, size in (zip(*group, strict=True) for group in zip(*per_call, strict=True))
        ]
        found.append([span for span in groups for _ in range(count // len(groups))])
    return found


def _told(calls: Sequence[Ends]) -> list[list[tuple[float, float]]]:
    """Per call and key head (apart, size)."""
    low, high = torch.stack([torch.stack(side) for side in zip(*calls, strict=True)]).cpu().double()  # [calls, B, G, E]
    apart, size = (high - low).amax((1, 3)).tolist(), torch.maximum(high, -low).amax((1, 3)).tolist()
    return [list(zip(*call, strict=True)) for call in zip(apart, size, strict=True)]


class Projections:
    """The output projections behind the layers: looked at while a GPU is at work, told when it is done."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._columns: dict[str, Tensor | None] = {}

    def look(self, layers: Iterable[Layer]) -> None:
        """Nothing waits; a projection is looked at once."""
        for layer in layers:
            if layer.reason is None and layer.name not in self._columns:
                self._columns[layer.name] = self._of(layer)

    def find_unread(self, layers: Sequence[Layer]) -> None:
        """Note in each layer the heads whose columns are 0, with one wait for all of them.

        What a module makes of several calls is its own affair: differential attention mixes the columns of two.
        """
        calls = Counter(layer.name for layer in layers)
        once = [layer for layer in layers if layer.reading is not None and calls[layer.name] == 1]
        self.look(once)
        known = [(layer, columns) for layer in once if (columns := self._columns[layer.name]) is not None]
        for (layer, _), columns in zip(known, landed([columns for _, columns in known]), strict=True):
            most = columns.view(layer.heads, -1).amax(1)
            layer.unread = (most <= NOTHING * most.amax()).nonzero().flatten().tolist()

    def _of(self, layer: Layer) -> Tensor | None:
        """[H·E] the largest number in each column; None where the projection is not found, or not of these heads."""
        if layer.name not in self._modules:
            return None
        weight = output_weight(self._modules[layer.name], self._modules.get(layer.name.rpartition(".")[0]))
        if weight is None or weight.shape[1] != layer.heads * layer.value_dim:
            return None
        return torch.linalg.vector_norm(weight.detach(), torch.inf, dim=0)
