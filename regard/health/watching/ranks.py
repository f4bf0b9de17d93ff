"""Joins a monitor's samples over ranks through the process group's key-value store: nobody ever waits for anybody.

| when | who | does |
| --- | --- | --- |
| a sample was measured at step s | each rank | posts its tables under s |
| a later step begins, and all have posted s | the first rank | merges them, and posts the result and the next step |
| that step begins | each rank | reads the result: the same numbers, and so the same incidents, at the same step |

Of more than 64 ranks that hold the same heads, 64 send their tables of a step, in turns; the others what they know of
their loss and of sudden changes. No collective is made, so a monitor cannot run out of step with the model's own.
Between the second and the third row lies a whole step of training, in which ranks that train together meet. A rank that
posts nothing (its data have ended, it has died, it has no monitor) is left out `timeout` seconds later, and that is
said; ranks that are left without the first one watch alone. Messages are JSON and the bytes of float64 tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._core.dtensor import is_dtensor
from regard.health.watching.groups import find_given_groups, sketch_weights
from regard.health.watching.sample import COLUMNS, LayerKey, LayerSample, empty_table, merge_ranks

CLOSING = 5.0  # seconds that `close` waits for the samples of others
PAUSE = 0.02
LOOKS = 10  # that a rank must be absent from at least before it is left out
MOST_TABLES = 64  # ranks with the same heads that send their tables of a step; of more, they take turns
KEPT = 16  # merged samples that stay in the store; ranks read them within a step or two
_NUMBERS = itertools.count()


class GroupNeeded(ValueError):
    """The ranks cannot be put together without a group."""


@dataclass
class Joined:
    """A sample over ranks: its layers, the first step within the budget, and what is to be said about ranks."""

    step: int
    layers: list[LayerSample]
    first_step: int = 1
    absent: list[int] = field(default_factory=list)  # ranks that posted nothing
    refused: str = ""  # why the ranks cannot be put together
    loss: dict[str, Any] = field(default_factory=dict)  # of the first rank; lost where it is on any


@dataclass
class _Posted:
    step: int
    tables: dict[LayerKey, Tensor]
    looked: float  # when it was last looked whether all have come
    waited: float = 0.0  # seconds of training since it was posted

    def wait(self, most: float) -> None:
        """Counts the time since the last look; a pause of the training (evaluation, a checkpoint) as `most`."""
        now = time.monotonic()
        self.waited += min(now - self.looked, most)
        self.looked = now


class Ranks:
    """The ranks that sample together, or this process alone."""

    def __init__(self, model: nn.Module, group: Any, tensor_group: Any, pipeline_group: Any, timeout: float) -> None:
        self.model, self.timeout, self.alone = model, timeout, ""  # why this rank is alone
        self.groups, self.is_known = find_given_groups(model, group, tensor_group, pipeline_group)
        self.members: list[int] = []
        self._posted: list[_Posted] = []
        self._gone: set[int] = set()
        self._has_compared = False
        self._joined: list[str] = []  # keys of the last samples that this rank merged
        self._inputs: str | None = None  # a sketch of what the first forward was given
        number = next(_NUMBERS)
        if dist.is_available() and dist.is_initialized():
            is_group = group is not None and not hasattr(group, "mesh_dim_names")
            self.members = dist.get_process_group_ranks(group) if is_group else list(range(dist.get_world_size()))
        if len(self.members) > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
                store = store.clone()  # its own connection: others may be waiting on theirs
            self._store: Any = dist.PrefixStore(f"regard/monitor/{number}", store)
            self._store.set(f"made/{dist.get_rank()}", "1")

    def is_distributed(self) -> bool:
        """True if samples are joined over several ranks."""
        return len(self.members) > 1 and not self.alone and dist.is_initialized()

    def is_first(self) -> bool:
        """True on the rank that merges and writes: the first of those that are there."""
        return not (len(self.members) > 1 and dist.is_initialized()) or dist.get_rank() == self._leader()

    def _leader(self) -> int:
        return next((rank for rank in self.members if rank not in self._gone), self.members[0])

    def key(self, order: int, label: str, heads: int) -> LayerKey:
        """Returns the key of a layer's heads on this rank."""
        stage, shard = (0 if one is None else dist.get_rank(one) for one in (self.groups.pipeline, self.groups.tensor))
        return LayerKey(stage, order, label, shard * heads, heads)

    def post(
        self, step: int, tables: dict[LayerKey, Tensor], spent: float, elapsed: float, loss: dict[str, Any]
    ) -> None:
        """Hands over this rank's tables of a step, and what it knows of its loss."""
        head: dict[str, Any] = {"spent": spent, "elapsed": elapsed, "loss": loss}
        if not (self._has_compared or self.is_known):
            sketch = sketch_weights(self.model)
            shapes = "\n".join(line.rpartition(" ")[0] for line in sketch.splitlines())
            head["weights"] = [*(hashlib.md5(text.encode()).hexdigest() for text in (shapes, sketch)), self._inputs]
        self._posted.append(_Posted(step, tables, time.monotonic()))
        sent = tables if self._is_turn(step) else {}
        self._store.set(f"{step}/{dist.get_rank()}", _pack({**head, "keys": list(sent)}, list(sent.values())))

    def _is_turn(self, step: int) -> bool:
        """True if this rank sends its tables of a step: among thousands, one in so many of those with its heads."""
        if self.groups.same:
            at, count = 0, 1
            for group in self.groups.same:
                at, count = at * dist.get_world_size(group) + dist.get_rank(group), count * dist.get_world_size(group)
        elif self.groups.tensor is None and self.groups.pipeline is None:
            at, count = self.members.index(dist.get_rank()), len(self.members)
        else:
            return True  # which ranks hold the same heads is not known
        return (at + step) % -(-count // MOST_TABLES) == 0

    def note_inputs(self, inputs: Iterable[Any]) -> None:
        """Keeps a sketch of what the first forward is given: tensor-parallel ranks are given the same."""
        if self._inputs is None and self.is_distributed() and not self.is_known:
            given = next((x for x in inputs if isinstance(x, Tensor) and not is_dtensor(x) and not x.is_meta), None)
            if given is not None:
                total = given.detach().flatten()[:4096].double().sum().item()
                self._inputs = f"{tuple(given.shape)} {total!r}"

    def read(self, step: int, budget: float, least: float, closing: bool = False, waits: bool = True) -> list[Joined]:
        """Returns the samples that are due at the beginning of `step`; all that can be had if the monitor is closing.

        budget, least: what `Monitor` may spend, for `first_step_within`. waits: for the others, when closing.
        """
        try:
            return self._read(step, budget, least, closing, CLOSING if waits else 0.0)
        except Exception as error:  # the store is gone: its process has ended
            self.alone = f"{type(error).__name__}: {error}"
            return []

    def _read(self, step: int, budget: float, least: float, closing: bool, most: float) -> list[Joined]:
        found, until = [], time.monotonic() + most
        while self._posted and self.is_distributed():
            joined = self._read_next(step, budget, least, closing)
            if joined is not None:
                found.append(joined)
            elif not closing or time.monotonic() > until:
                break
            else:
                time.sleep(PAUSE)
        if self.alone:
            found += [Joined(one.step, self.merge_own(one.tables)) for one in self._posted]
            self._posted.clear()
        return found

    def _read_next(self, step: int, budget: float, least: float, closing: bool) -> Joined | None:
        posted, own = self._posted[0], dist.get_rank()
        posted.wait(self.timeout / LOOKS)
        joined = None
        if own == self._leader() and not self._store.check([f"{posted.step}/joined"]):
            self._join(posted, step, budget, least, closing)
        if self._store.check([f"{posted.step}/joined"]):
            head, tables = _unpack(self._store.get(f"{posted.step}/joined"))
            if head["at"] > step and not closing:
                return None
            layers = [LayerSample(label, table) for (label, _), table in zip(head["layers"], tables, strict=True)]
            joined = Joined(posted.step, layers, head["first"], head["absent"], head["refused"], head["loss"])
            self._has_compared = True
            self._gone.update(head["absent"])
            if own in self._gone:
                self.alone = f"it sent no sample of step {posted.step} for {self.timeout:g} s"
        elif posted.waited > 2 * self.timeout:
            self.alone = f"rank {self._leader()} has joined no sample for {2 * self.timeout:g} s"
            joined = Joined(posted.step, self.merge_own(posted.tables))
        if joined is not None:
            self._posted.pop(0)
        return joined

    def _join(self, posted: _Posted, step: int, budget: float, least: float, closing: bool) -> None:
        """Merges the tables of all ranks, once they have come or those that have not are late."""
        wanted = [rank for rank in self.members if rank not in self._gone]
        have_come = self._store.check([f"{posted.step}/{rank}" for rank in wanted])
        if not (have_come or closing) and posted.waited < min(1.0, self.timeout):
            return  # soon; asking for each rank takes its time
        ranks, absent = wanted, []
        if not have_come:
            went_on = {rank for rank in wanted for one in self._posted[1:] if self._store.check([f"{one.step}/{rank}"])}
            ranks = [rank for rank in wanted if self._store.check([f"{posted.step}/{rank}"])]
            absent = [rank for rank in wanted if rank not in ranks and rank not in went_on]  # samples come in order
        is_missing = self._are_missing(absent, posted) and (closing or step > posted.step + 1)
        if absent and posted.waited < self.timeout and not is_missing:
            return
        received = [_unpack(self._store.get(f"{posted.step}/{rank}")) for rank in ranks]
        keyed = [
            {LayerKey(*key): table for key, table in zip(head["keys"], tables, strict=True)}
            for head, tables in received
            if head["keys"]
        ]
        keys = sorted({key for tables in keyed for key in tables})
        stacked = [torch.stack([tables.get(key, empty_table(key.heads)) for tables in keyed]) for key in keys]
        layers = merge_ranks(keys, stacked)
        losses = [one["loss"] for one, _ in received]
        loss = {**losses[0], "lost": next((one["lost"] for one in losses if one["lost"]), "")}
        loss["sudden"] = [one for each in losses for one in each["sudden"]]
        costs = [(one["spent"], one["elapsed"]) for one, _ in received]
        head = {
            "at": step + 1, "layers": [(one.label, len(one.table)) for one in layers], "absent": absent,
            "loss": loss, "first": first_step_within(costs, budget, posted.step, least),
            "refused": self._compare([one.get("weights") for one, _ in received], ranks),
        }  # fmt: skip
        self._store.set(f"{posted.step}/joined", _pack(head, [one.table for one in layers]))
        self._joined.append(f"{posted.step}/joined")
        old, self._joined = self._joined[:-KEPT], self._joined[-KEPT:]
        for key in (*(f"{posted.step}/{rank}" for rank in ranks), *old):
            self._store.delete_key(key)

    def _are_missing(self, absent: list[int], posted: _Posted) -> bool:
        """True if ranks without a sample never made a monitor: after a step of training together they would have."""
        return self.find_unmade(absent) == absent and posted.waited > 1.0

    def ask(self, step: int) -> None:
        """Asks every rank to take a sample of `step`, the next but one, because something looks wrong here."""
        try:
            self._store.set(f"look/{step}", b"1")
        except Exception as error:
            self.alone = f"{type(error).__name__}: {error}"

    def is_asked(self, step: int) -> bool:
        """True if a rank asked for a sample of `step`."""
        try:
            return self.is_distributed() and self._store.check([f"look/{step}"])
        except Exception as error:
            self.alone = f"{type(error).__name__}: {error}"
            return False

    def explain(self, joined: Joined) -> str:
        """Returns which ranks a sample lacks, and why; raises GroupNeeded where ranks hold other heads."""
        kind, *pair = joined.refused.split(" ")
        if kind == "heads":
            raise GroupNeeded(
                f"Monitor: ranks {pair[0]} and {pair[1]} are given the same and hold different weights of queries and "
                "keys. If these are different heads of the same layers, pass tensor_group=; if the ranks train models "
                "of their own, group="
            )
        if kind == "layers":
            self.alone = f"ranks {pair[0]} and {pair[1]} hold different layers (pass pipeline_group=)"
        if not joined.absent or self.alone:
            return ""
        names = ", ".join(map(str, joined.absent[:8]))
        if self.find_unmade(joined.absent) == joined.absent:
            return f"Monitor was not made on ranks {names}, so they are not watched. Make it on every rank."
        return (
            f"{self.name()}: rank {names} sent no sample of step {joined.step} for {self.timeout:g} s, so it is left "
            "out: its data have ended, it runs other steps, or it has failed"
        )

    def name(self) -> str:
        """Returns how messages name this rank."""
        return f"Monitor on rank {dist.get_rank()}"

    def find_unmade(self, ranks: list[int]) -> list[int]:
        """Returns those of the ranks on which no monitor was made."""
        return [rank for rank in ranks if not self._store.check([f"made/{rank}"])]

    def _compare(self, weights: list[Any], ranks: list[int]) -> str:
        """Returns which two ranks hold other heads of the same layers (they are given the same), or other weights."""
        known = [(rank, *one) for rank, one in zip(ranks, weights, strict=True) if one is not None]
        pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a[2] != b[2]]
        heads = [(a, b) for a, b in pairs if a[1] == b[1] and a[3] == b[3] is not None]
        kind = "heads" if heads else "layers"
        return next((f"{kind} {a[0]} {b[0]}" for a, b in heads or pairs), "")

    def merge_own(self, tables: Mapping[LayerKey, Tensor]) -> list[LayerSample]:
        """Returns one table per layer of this rank alone."""
        return merge_ranks(list(tables), [table[None] for table in tables.values()])


def first_step_within(costs: list[tuple[float, float]], budget: float, step: int, least: float) -> int:
    """Returns the first step at which no rank has spent more than `budget` of its time, of `least` s at least."""
    waits = [1.0]
    for spent, elapsed in costs:
        if spent > budget * max(elapsed, least) and elapsed > 0:
            waits.append(step * spent / (budget * elapsed))
    return math.ceil(max(waits))


def _pack(head: dict, tables: list[Tensor]) -> bytes:
    numbers = b"".join(table.double().numpy().tobytes() for table in tables)
    return zlib.compress(json.dumps(head).encode() + b"\n" + numbers, 1)


def _unpack(message: bytes) -> tuple[dict, list[Tensor]]:
    text, _, numbers = zlib.decompress(message).partition(b"\n")
    head = json.loads(text)
    sizes = [key[-1] for key in head["keys"]] if "keys" in head else [heads for _, heads in head["layers"]]
    whole = torch.from_numpy(np.frombuffer(numbers, dtype=np.float64).copy()).view(-1, len(COLUMNS))
    return head, list(whole.split(sizes)) if sizes else []
