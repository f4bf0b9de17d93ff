"""A rank that dies, stalls or raises: the others end within the group's timeout, and say which rank, at which step.

Every rank writes to the group's store, at every step and at least twice a second, how often it has done so, the step
it is at, and what it raised there; a thread of its own does that, so that no step waits for the store. A rank whose
count stands still is dead (or frozen); if every count moves, the rank with the least progress has stalled. Counts are
compared with themselves, never with a clock of another machine. The first to find out writes it down, and whoever fails
later, because its neighbour has already left, reads that and tells the same.

The store lives in rank 0's process, unless torchrun keeps it. So the others remember where rank 0 was last seen and
what it wrote down, for when it goes and takes the store along; and rank 0 stays a moment after it wrote something down.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import ClassVar, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, get_process_group_ranks

BEAT = 0.5  # seconds between two signs of life, at most
PAUSE = 0.05  # and at least: steps of a fast ring are not told one by one
SILENT = 4 * BEAT  # a rank that gave none for so long is dead
PATIENCE = 2 * SILENT  # a store that does not answer for so long is gone
LOST = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe", "nccl")  # words of a wait that failed


class RankError(RuntimeError):
    """Another rank died, stalled or raised. `.rank` (of the whole job) and `.step` say which one, and where it was."""

    def __init__(self, message: str, rank: int, step: str):
        super().__init__(message)
        self.rank, self.step = rank, step


class Seen(NamedTuple):
    """What a rank last told of itself."""

    beats: int = 0
    progress: int = -1
    step: str = "start"
    raised: str = ""


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
        self.keeps = _keeper() == "rank 0"
        self.progress, self.step, self.beats, self.note = 0, "start", 0, ""
        self.first, self.told = Seen(), ""  # rank 0, and the culprit, as last read
        self.active = 0  # calls and waits that this rank is in: outside of them rank 0 may leave
        self.stopped, self.moved = threading.Event(), threading.Event()
        self.lost = False  # has the store stopped answering?
        self._beat()
        self.thread = threading.Thread(target=self._run, name="regard-parallel-watch", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Watch:
        key = group if group is not None else dist.group.WORLD
        with cls._lock:
            known = cls._all.get(key)
            if known is not None and known.lost:
                raise known._remembered(f"rank {known.rank} begins a call, its last step was {known.step!r}")
            for gone in [other for other, watch in cls._all.items() if watch.stopped.is_set() and not watch.lost]:
                del cls._all[gone]
            if key not in cls._all:
                try:
                    cls._all[key] = cls(group)
                except dist.DistNetworkError as error:
                    raise _without_store("start", f"rank {dist.get_rank()}: {_first_line(error)}") from error
            return cls._all[key]

    @classmethod
    def current(cls) -> list[Watch]:
        """Those of this process that still give signs of life."""
        return [watch for watch in cls._all.values() if not watch.stopped.is_set()]

    def at(self, step: str, at: int) -> None:
        """This rank begins a step."""
        self.progress += 1
        self.step, self.note = f"{step} {at}", ""
        self.moved.set()

    def raised(self, error: Exception) -> None:
        """This rank leaves the call it was in; nobody waits for it in vain without being told why."""
        self.note = f"raised {type(error).__name__}: {_first_line(error)}"
        try:
            self._beat()
        except RuntimeError:  # the store is gone: there is nobody to tell
            self.moved.set()

    def stop(self) -> None:
        """No more signs of life; a thread that is still in the store when the interpreter ends would abort it."""
        self.stopped.set()
        self.moved.set()
        self.thread.join(2.0)

    def _run(self) -> None:
        while not self.stopped.wait(PAUSE):
            self.moved.wait(BEAT / 4 if self.active else BEAT)
            self.moved.clear()
            try:
                self._beat()
                self._look()
            except Exception:  # the store is gone: the job ends, and nobody will look any more
                self.lost = not self.stopped.is_set()
                self.stopped.set()

    def _beat(self) -> None:
        self.beats += 1
        self.store.set(f"rank {self.rank}", f"{self.beats}|{self.progress}|{self.step}|{self.note}")

    def _look(self) -> None:
        if self.keeps and self.rank != 0 and self.active:
            self.first = self._seen(0)
            self.told = self._written() or self.told

    def blame(self, error: RuntimeError, seconds: float) -> RuntimeError:
        """The error to raise in place of one that ended a wait for another rank, after so many seconds."""
        if isinstance(error, RankError):
            return error
        cause = _first_line(error)
        waited = seconds > 1.0 or any(word in cause.lower() for word in LOST)
        found: list[str | None] = []
        asking = threading.Thread(target=self._ask, args=(waited, found), daemon=True)
        asking.start()
        asking.join(SILENT + PATIENCE)
        here = f"rank {self.rank} was at step {self.step!r}: {cause}"
        if not found:
            return self._remembered(here)
        return error if found[0] is None else _named(found[0], here)

    def _remembered(self, here: str) -> RankError:
        """The same without the store: by what was last read from it."""
        if self.told:
            return _named(self.told, here)
        return _without_store(self.first.step if 0 in self.ranks else "unknown", here)

    def _ask(self, waited: bool, found: list) -> None:
        try:
            found.append(self._culprit(waited))
        except Exception:  # no answer: what is remembered must do
            return

    def _culprit(self, waited: bool) -> str | None:
        """rank|what befell it|its step, the same for every rank that asks; None if no other rank is at fault."""
        if not self._written():
            before = {rank: self._seen(rank) for rank in self.ranks}
            deadline = time.monotonic() + SILENT
            while time.monotonic() < deadline and not self._written():
                time.sleep(BEAT / 4)
                self._beat()
            after = {rank: self._seen(rank) for rank in self.ranks}
            raised = [rank for rank in self.ranks if after[rank].raised and rank != self.rank]
            silent = [rank for rank in self.ranks if after[rank].beats == before[rank].beats]
            if not (raised or silent or waited):
                return None
            others = [rank for rank in self.ranks if rank != self.rank]
            rank = min(raised or silent or others, key=lambda rank: after[rank].progress)
            what = after[rank].raised or ("died" if silent else "stalled")
            self.store.compare_set("culprit", "", f"{rank}|{what.replace('|', '/')}|{after[rank].step}")
            if self.rank == 0 and self.keeps:
                time.sleep(2 * BEAT)  # so that the others have read it before the store goes
        return self._written()

    def _written(self) -> str:
        return self.store.get("culprit").decode() if self.store.check(["culprit"]) else ""

    def _seen(self, rank: int) -> Seen:
        if not self.store.check([f"rank {rank}"]):
            return Seen()
        beats, progress, step, raised = self.store.get(f"rank {rank}").decode().split("|", 3)
        return Seen(int(beats), int(progress), step, raised)


def _named(culprit: str, here: str) -> RankError:
    number, what, step = culprit.split("|", 2)
    return RankError(f"rank {number} {what} at step {step!r}; {here}", int(number), step)


def _without_store(step: str, here: str) -> RankError:
    why = f"{_keeper()} kept the group's store, which does not answer; that is where rank 0 was last seen"
    return RankError(f"rank 0 died at step {step!r} ({why}); {here}", 0, step)


def _keeper() -> str:
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
