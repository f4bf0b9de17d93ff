"""`RankGroup`: the ranks that share a sequence, and every message between them.

All waiting for other ranks happens here. torch's own errors and timeouts end a wait; they are raised as a `RankError`
that names the step, and the rank where torch tells it. `record_sent` lists what is sent.
"""

from __future__ import annotations

import math
import os
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

Group = dist.ProcessGroup | DeviceMesh | None  # None is all ranks
LOST = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe", "nccl")  # gloo raises RuntimeErrors
DRAIN_SECONDS = 10.0  # at most, for the transfers that are under way when this rank raises


_records: list[list[tuple[str, int]]] = []  # one for each open `record_sent`


@contextmanager
def record_sent() -> Iterator[list[tuple[str, int]]]:
    """List (step, bytes) of each message that this process sends through `regard.parallel` inside the block.

    A collective (all-reduce, broadcast by its root) counts its payload once, whatever algorithm the backend uses.

    >>> with record_sent() as sent:
    ...     pass
    >>> sent
    []
    """
    sent: list[tuple[str, int]] = []
    _records.append(sent)
    try:
        yield sent
    finally:
        _records.remove(sent)


def _record(step: str, x: Tensor) -> None:
    for sent in _records:
        sent.append((step, x.numel() * x.element_size()))


def pack(*tensors: Tensor) -> Tensor:
    """Return tensors of one dtype as one flat tensor, which is sent as one message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return what `pack` was given, of these shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


class RankError(RuntimeError):
    """Contact with another rank was lost: it died, stalled past the group's timeout, or left the call after an error.

    Attributes:
        rank: the rank (of the whole job) that this one waited for; None in a collective, where torch names none.
        step: the step that this rank was at.
    """

    def __init__(self, message: str, rank: int | None, step: str) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


@dataclass
class RankGroup:
    """One process's view of a process group. Ranks are counted within the group."""

    process_group: dist.ProcessGroup | None
    rank: int
    world: int
    cpu_only: bool = False  # True if the backend carries CPU tensors only (gloo)
    transfers: list[Transfer] = field(default_factory=list)  # under way

    @classmethod
    def from_torch(cls, group: Group = None) -> RankGroup:
        """Return this process's view of a process group, of a one-dimensional DeviceMesh, or of all ranks (None)."""
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
        return cls(group, rank, dist.get_world_size(group), dist.get_backend(group) == "gloo")

    def exchange(self, sent: Tensor, received: Tensor, step: str, at: int) -> Transfer:
        """Start sending to the next rank of the ring and receiving from the one before; `.wait()` ends it."""
        return self.send_receive(sent, received, (self.rank + 1) % self.world, (self.rank - 1) % self.world, step, at)

    def send_receive(
        self, sent: Tensor | None, received: Tensor | None, to: int, source: int, step: str, at: int = 0
    ) -> Transfer:
        """Start sending to one rank and receiving from another; None leaves that direction out."""
        transfer = Transfer(self, step, at, received)
        operations = []
        if sent is not None and sent.numel():
            transfer.sent = self._to_transport(sent)
            operations.append(dist.P2POp(dist.isend, transfer.sent, group=self.process_group, group_peer=to))
            _record(step, sent)
        if received is not None and received.numel():
            on_host = self._needs_host_copy(received)
            transfer.received = torch.empty_like(received, device="cpu") if on_host else received
            operations.append(dist.P2POp(dist.irecv, transfer.received, group=self.process_group, group_peer=source))
        if self.cpu_only:
            for operation in operations:
                with self.guard(step, at, operation.peer):
                    transfer.add(operation.op(operation.tensor, operation.peer, self.process_group), operation.peer)
        elif operations:
            with self.guard(step, at):
                for work in dist.batch_isend_irecv(operations):  # NCCL joins both into one
                    transfer.add(work)
        return transfer

    def all_reduce(self, x: Tensor, step: str, at: int = 0) -> Tensor:
        """Return the sum over all ranks, in place where the backend can."""
        if self.world == 1:
            return x
        carried = self._to_transport(x)
        with self.guard(step, at):
            dist.all_reduce(carried, group=self.process_group)
        _record(step, x)
        return carried.to(x.device)

    def broadcast(self, x: Tensor, root: int, step: str, at: int = 0) -> Tensor:
        """Return the root's x on every rank."""
        transfer = Transfer(self, step, at, x)
        if self.world == 1 or not x.numel():
            return x
        transfer.received = self._to_transport(x)
        with self.guard(step, at):
            work = dist.broadcast(transfer.received, group=self.process_group, group_src=root, async_op=True)
        transfer.add(work)
        if self.rank == root:
            _record(step, x)
        return transfer.wait()

    def reduce(self, x: Tensor, root: int, step: str, at: int = 0) -> Tensor:
        """Return the sum over all ranks at the root; elsewhere the result is undefined."""
        if self.world == 1 or not x.numel():
            return x
        carried = self._to_transport(x)
        with self.guard(step, at):
            dist.reduce(carried, group=self.process_group, group_dst=root)
        if self.rank != root:
            _record(step, x)
        return carried.to(x.device)

    def all_gather_numbers(self, numbers: Sequence[int], step: str, at: int = 0) -> list[list[int]]:
        """Return every rank's list of 64-bit integers."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device())
        if self.world == 1:
            return [mine.tolist()]
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        with self.guard(step, at):
            dist.all_gather(everyone, mine, group=self.process_group)
            return torch.stack(everyone).tolist()

    def broadcast_text(self, text: str, size: int, root: int, step: str) -> str:
        """Return the root's text of `size` bytes on every rank."""
        mine = torch.tensor(list(text.encode()) if self.rank == root else [0] * size, dtype=torch.uint8)
        return bytes(self.broadcast(mine.to(self._device()), root, step).tolist()).decode()

    @contextmanager
    def guard(self, step: str, at: int, peer: int | None = None) -> Iterator[None]:
        """Raise torch's report of a lost rank as a `RankError` that names the step and, where known, the peer."""
        try:
            yield
        except RuntimeError as error:
            is_lost = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in LOST)
            if isinstance(error, RankError) or not is_lost:
                raise
            whom = "another rank" if peer is None else f"rank {peer}"
            cause = str(error).strip().splitlines()[0]
            message = f"rank {dist.get_rank()} lost contact with {whom} at step '{step} {at}': {cause}"
            raise RankError(message, peer, f"{step} {at}") from error

    @contextmanager
    def drain_on_error(self) -> Iterator[None]:
        """Let transfers arrive before this rank's own error leaves the block, so that a later call can be made."""
        try:
            yield
        except RankError:
            raise
        except Exception:
            self._drain()
            raise

    def _drain(self) -> None:
        """Wait for transfers under way: a buffer freed before its message is sent breaks the connection."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for transfer in list(self.transfers):
            for work, _ in transfer.works:
                try:
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
                except RuntimeError:  # the other end never posted its part, or is gone: there is nothing to save
                    deadline = time.monotonic()
        self.transfers.clear()

    def _device(self) -> torch.device:
        return torch.device("cpu") if self.cpu_only else torch.device("cuda", torch.cuda.current_device())

    def _needs_host_copy(self, x: Tensor) -> bool:
        return self.cpu_only and x.device.type != "cpu"

    def _to_transport(self, x: Tensor) -> Tensor:
        return x.cpu() if self._needs_host_copy(x) else x.contiguous()


@dataclass(eq=False)
class Transfer:
    """A message under way, in one direction or both."""

    group: RankGroup
    step: str
    at: int
    target: Tensor | None
    sent: Tensor | None = None
    received: Tensor | None = None
    works: list[tuple[Any, int | None]] = field(default_factory=list)  # torch's handles, and whom each waits for

    def add(self, work: Any, peer: int | None = None) -> None:
        """Keep torch's handle of an operation until `wait`."""
        if not self.works:
            self.group.transfers.append(self)
        self.works.append((work, peer))

    def wait(self) -> Any:
        """Return what was received, once it is there."""
        for work, peer in self.works:
            with self.group.guard(self.step, self.at, peer):
                work.wait()
        if self.works:
            self.group.transfers.remove(self)
            self.works = []
        if self.received is not None and self.received is not self.target:
            assert self.target is not None
            self.target = self.received.to(self.target.device)
        self.sent = self.received = None
        return self.target


def join_group(timeout: float) -> bool | None:
    """Join a gloo group and return True in a process of torchrun; return None in any other process."""
    if not dist.is_available() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return True


def is_first_rank() -> bool:
    """True on rank 0, which prints for all, and in a process without a group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def local_device(name: str) -> str:
    """Return this process's own GPU for "cuda", and any other name unchanged."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and "LOCAL_RANK" in os.environ else name
