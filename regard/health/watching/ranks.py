"""Gathers a monitor's samples over ranks: one collective per sample, whatever layers each rank ran.

Ranks agree on the list of layers (pipeline stage, name, heads) at the first sample, and again at the sample after one
in which a rank met a new layer; the flag for that travels with the numbers. A layer that a rank did not run is an
empty table. What each rank spent on measuring travels too, so that all skip the same samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.health.watching.sample import COLUMNS, LayerKey, LayerSample, empty_table, merge_ranks

HEADER = 3  # met a new layer, seconds spent on measuring, seconds of training
MEET = timedelta(seconds=60)  # how long the first sample waits for a monitor on every rank
_NUMBERS = itertools.count()


class Ranks:
    """The ranks that sample together, or this process alone."""

    def __init__(self, group: Any = None, tensor_group: Any = None, pipeline_group: Any = None) -> None:
        self.group, self.tensor_group, self.pipeline_group = group, tensor_group, pipeline_group
        self.agreed: list[LayerKey] = []
        self.costs: list[tuple[float, float]] = []  # per rank: seconds spent on measuring, seconds of training
        self.missing: list[int] = []  # ranks without a monitor
        self._is_known, self._must_agree, self._number = False, True, next(_NUMBERS)
        if self.is_distributed():
            _store().set(self._key(dist.get_rank()), b"1")

    def is_distributed(self) -> bool:
        """True if samples are gathered from several ranks."""
        if self.missing or not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.group) > 1

    def is_first(self) -> bool:
        return not self.is_distributed() or dist.get_rank(self.group) == 0

    def _key(self, rank: int) -> str:
        return f"regard/monitor/{self._number}/{rank}"

    def find_missing(self) -> list[int]:
        """Returns the ranks on which no monitor was made, once; from then on this process is alone."""
        if self._is_known or not self.is_distributed():
            return []
        self._is_known = True
        ranks = range(dist.get_world_size()) if self.group is None else dist.get_process_group_ranks(self.group)
        try:
            _store().wait([self._key(rank) for rank in ranks], MEET)
        except (RuntimeError, dist.DistStoreError):
            self.missing = [rank for rank in ranks if not _store().check([self._key(rank)])]
        return self.missing

    def key(self, order: int, label: str, heads: int) -> LayerKey:
        """Returns the key of a layer's heads on this rank."""
        stage = 0 if self.pipeline_group is None else dist.get_rank(self.pipeline_group)
        shard = 0 if self.tensor_group is None else dist.get_rank(self.tensor_group)
        return LayerKey(stage, order, label, shard * heads, heads)

    def gather(self, tables: Mapping[LayerKey, Tensor], spent: float, elapsed: float) -> list[LayerSample]:
        """Returns one table per layer, merged over ranks; the same on every rank."""
        if not self.is_distributed():
            self.costs = [(spent, elapsed)]
            return merge_ranks(list(tables), [table[None] for table in tables.values()])
        if self._must_agree:
            known: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(known, [*self.agreed, *tables], group=self.group)
            self.agreed = sorted({LayerKey(*key) for keys in known for key in keys})
        met_new = any(key not in self.agreed for key in tables)
        parts = [torch.tensor([float(met_new), spent, elapsed], dtype=torch.float64)]
        parts += [(tables[key] if key in tables else empty_table(key.heads)).flatten() for key in self.agreed]
        sent = torch.cat(parts).to(self._device())
        world = dist.get_world_size(self.group)
        received = sent.new_empty(world * len(sent))
        dist.all_gather_into_tensor(received, sent, group=self.group)
        whole = received.cpu().view(world, -1)
        self._must_agree = bool(whole[:, 0].any())
        self.costs = [(spent, elapsed) for _, spent, elapsed in whole[:, :HEADER].tolist()]
        sizes = [key.heads * len(COLUMNS) for key in self.agreed]
        each = whole[:, HEADER:].split(sizes, 1) if sizes else ()
        shaped = [part.view(world, key.heads, -1) for key, part in zip(self.agreed, each, strict=True)]
        return merge_ranks(self.agreed, shaped)

    def _device(self) -> torch.device:
        on_gpu = "nccl" in dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def first_step_within(self, budget: float, step: int, least: float) -> int:
        """Returns the first step at which no rank has spent more than `budget` of its time, of `least` s at least."""
        waits = [1.0]
        for spent, elapsed in self.costs:
            if spent > budget * max(elapsed, least) and elapsed > 0:
                waits.append(step * spent / (budget * elapsed))
        return math.ceil(max(waits))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
