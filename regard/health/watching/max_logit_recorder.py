"""Measures the largest logit alone: one pass over q and k per call, no histograms, no comparison of outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem

import torch
from torch import Tensor

import regard
from regard.health.capture.call import Call
from regard.health.findings._finding import LOGIT_LIMIT
from regard.health.measurement.recorder import Layer
from regard.health.measurement.side_stream import HostCopies
from regard.health.watching.sample import AT
from regard.health.watching.timed_recorder import TimedRecorder


class MaxLogitRecorder(TimedRecorder):
    """Records the largest logit of every head; all uses of a module are one layer."""

    def __init__(self, sequences: int | None = None) -> None:
        super().__init__(sequences)
        self.largest: dict[tuple[str, int], Tensor] = {}  # layer key -> [heads]

    def _observe(self, call: Call, name: str, run_model: Callable[[], Tensor]) -> Tensor:
        self.key = name, 0
        layer = self.layers.setdefault(self.key, Layer(name, len(self.layers)))
        output = run_model()
        if call.obstacle is not None:
            layer.mark_unmeasured(call.obstacle)
            return output
        small = call if self.sequences is None else call.first_sequences(self.sequences)
        q, k, v = (x.detach() for x in (small.q, small.k, small.v))
        layer.heads = q.shape[1]
        if q.numel() and k.numel():
            with torch.no_grad():
                stats = regard.attention(q, k, v, **small.arguments, return_stats=("max_logit",))[1]
            largest = stats.max_logit.amax((0, 2)).float()
            known = self.largest.get(self.key, largest)
            self.largest[self.key] = torch.maximum(known, largest)
        return output

    def _can_wait(self, call: Call, name: str) -> bool:
        return False

    def _copy_to_host(self, copies: HostCopies) -> None:
        for key, largest in self.largest.items():
            copies.add(largest, partial(setitem, self.largest, key))

    def finish_batch(self) -> bool:
        """Reads the largest logits."""
        self._copies.finish()
        for key, largest in self.largest.items():
            self.layers[key].not_finite = (largest.isnan() | largest.isposinf()).nonzero()[:, 0].tolist()
        return False

    def has_measured(self, layer: Layer) -> bool:
        return (layer.name, 0) in self.largest

    def fill(self, layer: Layer, table: Tensor) -> None:
        largest = self.largest[layer.name, 0].double()
        table[:, AT["rows"]] = (largest > -torch.inf).double()
        table[:, AT["max_logit"]] = largest
        table[:, AT["exploding logits"]] = torch.where(largest > LOGIT_LIMIT, largest, torch.nan)

    def mark_flags(self, layers: list[Layer], tables: dict[int, Tensor]) -> None:
        """Does nothing: the only flag is set in `fill`."""
