"""The group of ranks that share a sequence, and the few things they tell one another.

Everything that waits for another rank waits here: a failure or the group's timeout becomes a `RankError` that names
the rank and the step (`faults`), and what is sent is counted (`traffic`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.parallel import traffic
from regard.parallel.failures import RankError, Watch

SETTLE = 10.0  # seconds, at most, for what is under way when this rank raises


@dataclass
class Line:
    """One process's end of a group. Ranks here count within the group."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    watch: Watch | None
    host: bool = False  # does the backend carry CPU tensors only?
    under_way: list[Pending] = field(default_factory=list)

    @classmethod
    def of(cls, group=None) -> Line:
        """This process's end of a process group, of a DeviceMesh of one dimension, or of all ranks (None)."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "no process group: start with torchrun and call torch.distributed.init_process_group() first, "
                "or use regard.attention on one process"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group: a DeviceMesh of {group.ndim} dimensions; pass one of them, mesh[name]")
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(f"group: this process (rank {dist.get_rank()}) is not one of its ranks")
            raise TypeError(f"group must be a process group, a DeviceMesh or None, got {type(group).__name__}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"group: this process (rank {dist.get_rank()}) is not one of its ranks")
        world = dist.get_world_size(group)
        host = dist.get_backend(group) == "gloo"
        return cls(group, rank, world, Watch.of(group) if world > 1 else None, host)

    def exchange(self, sent: Tensor, received: Tensor, step: str, at: int = 0, hop: int = 1) -> Pending:
        """Begin to send `sent` to rank + hop and to receive `received` from rank − hop; `.wait()` ends it."""
        to, source = (self.rank + hop) % self.world, (self.rank - hop) % self.world
        return self.swap(sent, received, to, source, step, at)

    def swap(
        self, sent: Tensor | None, received: Tensor | None, to: int, source: int, step: str, at: int = 0
    ) -> Pending:
        pending = Pending(self, step, at, received)
        operations = []
        if sent is not None and sent.numel():
            pending.sent = self._carried(sent)
            operations.append(dist.P2POp(dist.isend, pending.sent, group=self.group, group_peer=to))
            traffic.sent(step, sent.numel() * sent.element_size())
        if received is not None and received.numel():
            pending.received = torch.empty_like(received, device="cpu") if self._staged(received) else received
            operations.append(dist.P2POp(dist.irecv, pending.received, group=self.group, group_peer=source))
        with self.guard(step, at):
            pending.begun(dist.batch_isend_irecv(operations) if operations else [])
        return pending

    def all_reduce(self, x: Tensor, step: str, at: int = 0, op=dist.ReduceOp.SUM) -> Tensor:
        """The sum (or maximum) over all ranks, in place where the backend can."""
        if self.world == 1:
            return x
        carried = self._carried(x)
        with self.guard(step, at):
            dist.all_reduce(carried, op, group=self.group)
        traffic.sent(step, x.numel() * x.element_size())
        return carried.to(x.device)

    def broadcast(self, x: Tensor, root: int, step: str, at: int = 0) -> Tensor:
        """The root's x on every rank."""
        return self.begin_broadcast(x, root, step, at).wait()

    def begin_broadcast(self, x: Tensor, root: int, step: str, at: int = 0) -> Pending:
        """Begin to send the root's x to every rank; `.wait()` gives it."""
        pending = Pending(self, step, at, x)
        if self.world == 1 or not x.numel():
            return pending
        pending.received = self._carried(x)
        with self.guard(step, at):
            pending.begun([dist.broadcast(pending.received, group=self.group, group_src=root, async_op=True)])
        if self.rank == root:
            traffic.sent(step, x.numel() * x.element_size())
        return pending

    def reduce(self, x: Tensor, root: int, step: str, at: int = 0) -> Tensor:
        """The sum over all ranks, at the root; elsewhere nothing of use."""
        if self.world == 1 or not x.numel():
            return x
        carried = self._carried(x)
        with self.guard(step, at):
            dist.reduce(carried, group=self.group, group_dst=root)
        if self.rank != root:
            traffic.sent(step, x.numel() * x.element_size())
        return carried.to(x.device)

    def all_gather_numbers(self, numbers: Sequence[int], step: str, at: int = 0) -> list[list[int]]:
        """Every rank's list of 64-bit integers."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device())
        if self.world == 1:
            return [mine.tolist()]
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        with self.guard(step, at):
            dist.all_gather(everyone, mine, group=self.group)
            return torch.stack(everyone).tolist()

    @contextmanager
    def guard(self, step: str, at: int) -> Iterator[None]:
        """Whoever looks sees this rank at this step; what fails here is told with the rank that failed first."""
        if self.watch is None:
            yield
            return
        self.watch.at(step, at)
        self.watch.active += 1
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            told = self.watch.blame(error, time.monotonic() - start)
            if told is error:
                raise
            raise told from error
        finally:
            self.watch.active -= 1

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around work that others wait for: what is raised here is named by whoever waits in vain."""
        if self.watch is None:
            yield
            return
        self.watch.active += 1
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self.watch.raised(error)
            self._settle()
            raise
        finally:
            self.watch.active -= 1

    def _settle(self) -> None:
        """Let what is under way arrive: a buffer that goes before its message breaks the connection for later calls."""
        deadline = time.monotonic() + SETTLE
        for pending in list(self.under_way):
            for work in pending.works:
                try:
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
                except RuntimeError:  # the other end never posted its part, or is gone: there is nothing to save
                    deadline = time.monotonic()
        self.under_way.clear()

    def text(self, text: str, size: int, root: int, step: str) -> str:
        """The root's text of `size` bytes on every rank."""
        mine = torch.tensor(list(text.encode()) if self.rank == root else [0] * size, dtype=torch.uint8)
        return bytes(self.broadcast(mine.to(self._device()), root, step).tolist()).decode()

    def _device(self) -> torch.device:
        return torch.device("cpu") if self.host else torch.device("cuda", torch.cuda.current_device())

    def _staged(self, x: Tensor) -> bool:
        return self.host and x.device.type != "cpu"

    def _carried(self, x: Tensor) -> Tensor:
        return x.cpu() if self._staged(x) else x.contiguous()


@dataclass(eq=False)
class Pending:
    """A message under way in both directions."""

    line: Line
    step: str
    at: int
    target: Tensor | None
    sent: Tensor | None = None
    received: Tensor | None = None
    works: list = field(default_factory=list)

    def begun(self, works: list) -> None:
        self.works = works
        if works:
            self.line.under_way.append(self)

    def wait(self) -> Any:
        """What was received, once it is there."""
        with self.line.guard(self.step, self.at):
            for work in self.works:
                work.wait()
        if self.works:
            self.line.under_way.remove(self)
            self.works = []
        if self.received is not None and self.received is not self.target:
            self.target = self.received.to(self.target.device)
        self.sent = self.received = None
        return self.target
