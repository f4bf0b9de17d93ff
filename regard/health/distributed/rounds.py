"""Examines a corpus over ranks: batch n runs on rank n mod W, and after every W batches all ranks merge the readings.

Readings are merged batch by batch in the order of the corpus, whichever rank measured them: any number of ranks gives
the same bits. After a round rank 0 may write the merged readings to a file (`snapshot`), and an interrupted examination
goes on after the last batch in it, on as many ranks as there are then.
"""

from __future__ import annotations

import io
import os
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from regard.health.measure.layer_reading import LayerReading
from regard.health.measure.recorder import Layer, Recorder
from regard.health.report import files
from regard.parallel.group import RankError, RankGroup
from regard.parallel.handshake import compare_calls

SECONDS = 5.0  # between two snapshots
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class RoundError(RuntimeError):
    """A batch failed on one of the ranks; raised on all of them."""


class SnapshotError(ValueError):
    """The snapshot is of other data, or cannot be read."""


class Rounds:
    """Merges the readings of ranks between the batches of `regard.examine(group=…, snapshot=…)`."""

    def __init__(self, recorder: Recorder, group: Any, snapshot: str | os.PathLike | None, what: dict) -> None:
        self.recorder = recorder
        self.line = RankGroup.from_torch(None if group is True else group) if group is not None else None
        self.rank, self.world = (0, 1) if self.line is None else (self.line.rank, self.line.world)
        self.path = None if snapshot is None else Path(snapshot)
        self.what = what
        self.merged: dict[tuple[str, int], Layer] = {}
        self.done, self.written = 0, 0.0
        self.data = self.known = 0  # checksums of all batches so far, and of those in the snapshot
        self._resume()
        self.start = self.done

    def check_batch(self, number: int, batch: Any) -> None:
        """Compares the batches with those of the snapshot; every rank calls it before each batch."""
        if self.path is None:
            return
        self.data = checksum_batch(batch, self.data)
        if number + 1 == self.start and self.data != self.known:
            raise self._mismatch(f"its {self.start} batches are not the first {self.start} of these")

    def _mismatch(self, why: str) -> SnapshotError:
        return SnapshotError(f"snapshot {str(self.path)!r} is of another examination ({why}); remove it")

    def is_mine(self, number: int) -> bool:
        return number >= self.start and (number - self.start) % self.world == self.rank

    def end_batch(self, number: int) -> None:
        """Merges the readings if the batch ends a round; every rank calls it after each batch, its own or not."""
        if number >= self.start and (number + 1 - self.start) % self.world == 0:
            self._merge_round(number)

    def fail(self, number: int, error: BaseException) -> tuple[Exception, int]:
        """Ends the examination on every rank; returns (the error, the number of batches in the merged readings).

        A lost rank, or Ctrl-C, is raised at once, because the others cannot be reached any more.
        """
        if isinstance(error, (RankError, SnapshotError)) or not isinstance(error, Exception):
            raise error
        if not isinstance(error, RoundError):
            try:
                self._merge_round(number, error)
            except RoundError as raised:
                error = raised
        return error, self.done

    def _merge_round(self, number: int, failure: Exception | None = None, last: bool = False) -> None:
        """Merges every rank's batch of this round, on every rank; raises on all ranks what failed on any."""
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        layers = [_on_host(layer) for layer in self.recorder.layers.values()]
        for layer in self.recorder.layers.values():  # the next round's readings are its own
            layer.reading, layer.error, layer.empty_rows, layer.gates = None, 0.0, [], None
            layer.what_if = {}
        count = number + 1 if last else sys.maxsize  # of all batches, if this was the last
        everyone = self._gather((error, layers, count), number)
        errors = [(rank, error) for rank, (error, _, _) in enumerate(everyone) if error is not None]
        first = errors[0][0] if errors else self.world
        for _, layers, _ in everyone[:first]:
            for layer in layers:
                _add_layer(self.merged, layer)
        if errors:
            self.done = min(self.done + first, *(count for _, _, count in everyone))
            raise RoundError(f"rank {first}, batch {self.done}: {errors[0][1]}")
        if last:
            self.done = number + 1
        else:
            self.done += self.world
            self._write()

    def end(self, count: int) -> None:
        """Merges the last round, which may not be full, on every rank.

        A rank that has failed waits for the others' next merge, so that there is always one more.
        """
        if count < self.start:
            raise self._mismatch(f"it has {self.start} batches, these are {count}")
        self._merge_round(count - 1, last=True)

    def finish(self) -> list[Layer]:
        """Returns the merged layers, the same on every rank, and removes the snapshot."""
        if self.path is not None and self.rank == 0:
            self.path.unlink(missing_ok=True)
        return self.layers()

    def layers(self) -> list[Layer]:
        """Returns the layers merged so far, the same on every rank."""
        return list(self.merged.values())

    def _gather(self, sent: Any, number: int) -> list[Any]:
        if self.line is None or self.world == 1:
            return [sent]
        everyone = [None] * self.world
        with self.line.guard("examine batch", number):
            dist.all_gather_object(everyone, sent, group=self.line.process_group)
        return everyone

    def _write(self) -> None:
        now = time.monotonic()
        if self.path is None or self.rank != 0 or (self.written and now - self.written < SECONDS):
            return
        self.written = now
        content = {"what": self.what, "done": self.done, "data": self.data, "layers": self.layers()}
        written = io.BytesIO()
        torch.save(content, written)
        files.write(self.path, written.getvalue())

    def _resume(self) -> None:
        """Reads the snapshot on rank 0, if there is one, and sends it to the others."""
        content: dict = {"done": 0, "data": 0, "layers": []}
        failure: Exception | None = None
        if self.path is not None and self.rank == 0:
            try:
                content = self._read(self.path) or content
            except Exception as error:
                failure = error
        if self.line is not None:
            alike = {f"with different {name}": value for name, value in self.what.items()}
            alike["with and without a snapshot"] = self.path is None
            compare_calls(self.line, "examine", [], alike, failure)
            content = self._gather(content, 0)[0]
        elif failure is not None:
            raise failure
        self.done, self.known = content["done"], content["data"]
        for layer in content["layers"]:
            _add_layer(self.merged, layer)

    def _read(self, path: Path) -> dict | None:
        """Returns what a snapshot holds, None if there is none."""
        if not path.parent.is_dir():
            raise SnapshotError(f"snapshot {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        if path.is_dir():
            raise SnapshotError(f"snapshot {str(path)!r} is a folder; name a file in it")
        if not path.is_file():
            return None
        try:
            with torch.serialization.safe_globals([Layer, LayerReading]):
                content = torch.load(path, weights_only=True)
        except Exception:
            content = None
        is_whole = isinstance(content, dict) and {"what", "done", "data", "layers"} <= content.keys()
        if not is_whole or not all(isinstance(layer, Layer) for layer in content["layers"]):
            raise SnapshotError(f"snapshot {str(path)!r} is not one of regard's, or is damaged; remove it")
        if content["what"] != self.what:
            named = ", ".join(key for key, value in self.what.items() if content["what"].get(key) != value)
            raise self._mismatch(f"{named} differ")
        return content


def _on_host(layer: Layer) -> Layer:
    """Returns a copy of a layer whose readings are on the CPU."""
    return replace(
        layer, reading=None if layer.reading is None else layer.reading.cpu(),
        what_if={name: reading.cpu() for name, reading in layer.what_if.items()},
        gates=None if layer.gates is None else layer.gates.cpu(), refused=dict(layer.refused),
        anomalies=set(layer.anomalies),
    )  # fmt: skip


def _add_layer(merged: dict[tuple[str, int], Layer], layer: Layer) -> None:
    """Adds one batch's layer to the merged ones, as `Recorder` does on one process."""
    known = merged.get((layer.name, layer.use))
    if known is None:
        layer.index = len(merged)
        merged[layer.name, layer.use] = layer
        return
    known.refused.update(layer.refused)
    known.anomalies |= layer.anomalies
    if known.reason is None and known.reading is None:  # seen before, and not measured
        layer.refused, layer.anomalies, layer.index = known.refused, known.anomalies, known.index
        merged[layer.name, layer.use] = layer
    elif known.reason is None:
        known.add_use(layer)


def checksum_weights(model: torch.nn.Module) -> int:
    """Returns a checksum of the names and shapes of all weights, of their ends and of the sum of their bits."""
    checksum = 0
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x) or x.is_meta or x.layout != torch.strided:
            continue
        ends = x.detach().reshape(-1)
        checksum = zlib.crc32(f"{name} {tuple(x.shape)}".encode(), checksum)
        checksum = checksum_batch(torch.cat([ends[:64], ends[-64:]]), checksum)
        if not x.is_complex() and x.dtype.itemsize in BITS:
            checksum = zlib.crc32(str(int(ends.view(BITS[x.dtype.itemsize]).sum(dtype=torch.int64))).encode(), checksum)
    return checksum


def checksum_batch(x: Any, before: int = 0) -> int:
    """Returns a checksum of a batch, and of those before it."""
    if isinstance(x, Mapping):
        for name in sorted(x, key=str):
            before = checksum_batch(x[name], zlib.crc32(str(name).encode(), before))
    elif isinstance(x, (tuple, list)):
        for part in x:
            before = checksum_batch(part, before)
    elif isinstance(x, Tensor):
        before = zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode(), before)
        if x.layout == torch.strided and x.numel():
            before = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, before)
    elif hasattr(x, "__array_interface__"):  # numpy's
        before = checksum_batch(torch.as_tensor(x), before)
    else:
        before = zlib.crc32((repr(x) if isinstance(x, (int, float, str)) else type(x).__name__).encode(), before)
    return before
