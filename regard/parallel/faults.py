"""A rank that dies or stalls: the others end within the group's timeout, and say which rank it was and at which step.

Every rank writes to the group's store, at every step and at least twice a second, how often it has done so and the step
it is at; a thread of its own does that, so that no step waits for the store. A rank whose count stands still is dead
(or frozen); if every count moves, the rank with the least progress has stalled. Counts are compared with themselves,
never with a clock of another machine. The first to find out writes it down, and whoever fails later, because its
neighbour has already left, reads that and tells the same.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, get_process_group_ranks

BEAT = 0.5  # seconds between two signs of life, at most
PAUSE = 0.02  # and at least: steps of a fast ring are not told one by one
SILENT = 4 * BEAT  # a rank that gave none for so long is dead


class RankError(RuntimeError):
    """Another rank died or stalled. `.rank` (of the whole job) and `.step` say which one, and where it was."""

    def __init__(self, message: str, rank: int, step: str):
        super().__init__(message)
        self.rank, self.step = rank, step


class Watch:
    """This process's signs of life in a group, and its look at those of the others."""

    _all: ClassVar[dict[object, Watch]] = {}
    _lock = threading.Lock()

    def __init__(self, group: dist.ProcessGroup | None):
        self.ranks = get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank = dist.get_rank()
        store = _get_default_store()
        clone = getattr(store, "clone", None)
        whole = group if group is not None else dist.group.WORLD
        name = f"regard.parallel/{whole.group_name}/" + ",".join(map(str, self.ranks))
        self.store = dist.PrefixStore(name, store if clone is None else clone())
        self.progress, self.step, self.beats = 0, "start", 0
        self.stopped, self.moved = threading.Event(), threading.Event()
        self._beat()
        self.thread = threading.Thread(target=self._run, name="regard-parallel-watch", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Watch:
        key = group if group is not None else dist.group.WORLD
        with cls._lock:
            for gone in [other for other, watch in cls._all.items() if watch.stopped.is_set()]:
                del cls._all[gone]
            if key not in cls._all:
                cls._all[key] = cls(group)
            return cls._all[key]

    def at(self, step: str, at: int) -> None:
        """This rank begins a step."""
        self.progress += 1
        self.step = f"{step} {at}"
        self.moved.set()

    def stop(self) -> None:
        """No more signs of life; a thread that is still in the store when the interpreter ends would abort it."""
        self.stopped.set()
        self.moved.set()
        self.thread.join(2.0)

    def _run(self) -> None:
        while not self.stopped.wait(PAUSE):
            self.moved.wait(BEAT)
            self.moved.clear()
            try:
                self._beat()
            except Exception:  # the store is gone: the job ends, and nobody will look any more
                self.stopped.set()

    def _beat(self) -> None:
        self.beats += 1
        self.store.set(f"rank {self.rank}", f"{self.beats}|{self.progress}|{self.step}")

    def blame(self, error: RuntimeError) -> RuntimeError:
        """The error to raise in place of one that a wait for another rank ended with."""
        if isinstance(error, RankError):
            return error
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        here = f"rank {self.rank} was at step {self.step!r}"
        try:
            rank, what, step = self._culprit()
        except Exception as lost:
            message = f"another rank failed, and the store does not answer ({lost}): its host died. {here}: {cause}"
            return RankError(message, self.ranks[0], "unknown")
        return RankError(f"rank {rank} {what} at step {step!r}; {here}: {cause}", rank, step)

    def _culprit(self) -> tuple[int, str, str]:
        """(rank, what befell it, its step), the same for every rank that asks."""
        if not self.store.check(["culprit"]):
            before = {rank: self._seen(rank) for rank in self.ranks}
            deadline = time.monotonic() + SILENT
            while time.monotonic() < deadline and not self.store.check(["culprit"]):
                time.sleep(BEAT / 4)
                self._beat()
            after = {rank: self._seen(rank) for rank in self.ranks}
            silent = [rank for rank in self.ranks if after[rank][0] == before[rank][0]]
            others = [rank for rank in self.ranks if rank != self.rank]
            rank = min(silent or others, key=lambda rank: after[rank][1])
            what = "died" if silent else "stalled"
            self.store.compare_set("culprit", "", f"{rank}|{what}|{after[rank][2]}")
        rank, what, step = self.store.get("culprit").decode().split("|", 2)
        return int(rank), what, step

    def _seen(self, rank: int) -> tuple[int, int, str]:
        if not self.store.check([f"rank {rank}"]):
            return 0, -1, "start"
        beats, progress, step = self.store.get(f"rank {rank}").decode().split("|", 2)
        return int(beats), int(progress), step
