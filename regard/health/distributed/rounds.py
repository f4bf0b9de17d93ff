"""Examines a corpus over ranks: batch n runs on rank n mod W, and after every W batches rank 0 merges the readings.

Readings are merged batch by batch in the order of the corpus, whichever rank measured them: any number of ranks gives
the same bits. After a round the merged readings may be written to a file (`snapshot`), and an interrupted examination
goes on after the last batch in it, on as many ranks as there are then. Rank 0 holds the merged layers, the other ranks
only those of their own round.
"""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.health.distributed.checksums import checksum_batch
from regard.health.measurement.recorder import Layer, Recorder
from regard.health.readings.layer_reading import LayerReading
from regard.health.report import files
from regard.parallel.group import RankError, RankGroup
from regard.parallel.handshake import compare_calls

SECONDS = 5.0  # between two snapshots


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
        """True if this rank runs the batch."""
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
        """Sends every rank's batch of this round to rank 0; raises on all ranks what failed on any."""
        sent: dict = {"error": None if failure is None else f"{type(failure).__name__}: {failure}", "layers": []}
        sent["layers"] = [_layer_to_dict(layer) for layer in self.recorder.layers.values()]
        for layer in self.recorder.layers.values():  # the next round's readings are its own
            layer.reading, layer.error, layer.empty_rows, layer.gates = None, 0.0, [], None
            layer.what_if.clear()
        sent["count"] = number + 1 if last else sys.maxsize  # of all batches, if this was the last
        everyone = self._gather(sent, number)
        errors = [(rank, x["error"]) for rank, x in enumerate(everyone) if x["error"] is not None]
        first = errors[0][0] if errors else self.world
        for rank, x in enumerate(everyone):
            if rank < first:
                for layer in x["layers"]:
                    _add_layer(self.merged, layer)
        round_ = self.done
        self.done += min(first, self.world)
        if errors:
            self.done = min(round_ + first, *(x["count"] for x in everyone))
            raise RoundError(f"rank {first}, batch {self.done}: {errors[0][1]}")
        if last:
            self.done = number + 1
        else:
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
        layers = self.layers()
        if self.path is not None and self.rank == 0:
            self.path.unlink(missing_ok=True)
        return layers

    def layers(self) -> list[Layer]:
        """Returns the layers merged so far, the same on every rank."""
        merged: dict[tuple[str, int], Layer] = {}
        for layer in self._broadcast([_layer_to_dict(layer) for layer in self.merged.values()]):
            _add_layer(merged, layer)
        return list(merged.values())

    def _gather(self, sent: dict, number: int) -> list[dict]:
        """Returns what every rank sent: all of it on rank 0, elsewhere only the errors and counts."""
        if self.line is None or self.world == 1:
            return [sent]
        step = "examine batch"
        packed = _pack(sent)
        sizes = self.line.all_gather_numbers([packed.numel(), sent["error"] is not None, sent["count"]], step, number)
        found = []
        for rank, (size, _, count) in enumerate(sizes):
            if rank == self.rank:
                found.append(sent)
                if rank:
                    self.line.send_receive(packed, None, 0, 0, step, number).wait()
            elif self.rank == 0:
                buffer = torch.empty(size, dtype=torch.uint8)
                found.append(_unpack(self.line.send_receive(None, buffer, rank, rank, step, number).wait()))
            else:
                found.append({"error": None, "layers": [], "count": count})
        failed = [rank for rank, (_, wrong, _) in enumerate(sizes) if wrong]
        if failed:
            texts = self._broadcast([x["error"] for x in found])
            for x, text in zip(found, texts, strict=True):
                x["error"] = text
        return found

    def _broadcast(self, x: Any) -> Any:
        """Returns rank 0's x on every rank."""
        if self.line is None or self.world == 1:
            return x
        packed = _pack(x)
        ((size, *_), *_) = self.line.all_gather_numbers([packed.numel()], "examine end")
        packed = packed if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        return _unpack(self.line.broadcast(packed, 0, "examine end"))

    def _write(self) -> None:
        now = time.monotonic()
        if self.path is None or self.rank != 0 or (self.written and now - self.written < SECONDS):
            return
        self.written = now
        content = {"what": self.what, "done": self.done, "data": self.data}
        content["layers"] = [_layer_to_dict(layer) for layer in self.merged.values()]
        written = io.BytesIO()
        torch.save(content, written)
        files.write(self.path, written.getvalue())

    def _resume(self) -> None:
        """Reads the snapshot on rank 0, if there is one, and sends its number of batches to the others."""
        content = None
        failure: Exception | None = None
        if self.path is not None and self.rank == 0:
            try:
                content = self._read(self.path)
            except Exception as error:
                failure = error
        if content is not None:
            for layer in content["layers"]:
                _add_layer(self.merged, layer)
            self.done, self.known = content["done"], content["data"]
        if self.line is not None:
            alike = {f"with different {name}": value for name, value in self.what.items()}
            alike["with and without a snapshot"] = self.path is None
            self.done, self.known = compare_calls(self.line, "examine", [self.done, self.known], alike, failure)[0]
        elif failure is not None:
            raise failure

    def _read(self, path: Path) -> dict | None:
        """Returns what a snapshot holds, None if there is none."""
        if not path.parent.is_dir():
            raise SnapshotError(f"snapshot {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        if path.is_dir():
            raise SnapshotError(f"snapshot {str(path)!r} is a folder; name a file in it")
        if not path.is_file():
            return None
        try:
            content = torch.load(path, weights_only=True)
        except Exception:
            content = None
        if not isinstance(content, dict) or not {"what", "done", "data", "layers"} <= content.keys():
            raise SnapshotError(f"snapshot {str(path)!r} is not one of regard's, or is damaged; remove it")
        if content["what"] != self.what:
            named = ", ".join(key for key, value in self.what.items() if content["what"].get(key) != value)
            raise self._mismatch(f"{named} differ")
        return content


def _layer_to_dict(layer: Layer) -> dict:
    """Returns a layer as plain numbers and tensors."""
    plain = {field.name: getattr(layer, field.name) for field in fields(Layer) if field.name != "early_heads"}
    plain["dtype"] = None if layer.dtype is None else str(layer.dtype).removeprefix("torch.")
    plain["reading"] = None if layer.reading is None else _reading_to_dict(layer.reading)
    plain["what_if"] = {name: _reading_to_dict(reading) for name, reading in layer.what_if.items()}
    plain["gates"] = None if layer.gates is None else layer.gates.cpu()
    plain["refused"], plain["anomalies"] = dict(layer.refused), sorted(layer.anomalies)
    return plain


def _reading_to_dict(reading: LayerReading) -> dict:
    """Returns a reading as its sums, on the CPU."""
    reading = reading.cpu()
    return dict(heads=reading.heads, flat=reading.flat, histogram=reading.histogram)


def _layer_from_dict(plain: dict) -> Layer:
    """Inverts `_layer_to_dict`."""
    readings = {name: LayerReading.from_sums(**sums) for name, sums in plain["what_if"].items()}
    layer = Layer(**{**plain, "what_if": readings, "anomalies": set(plain["anomalies"])})
    layer.dtype = None if plain["dtype"] is None else getattr(torch, plain["dtype"])
    layer.reading = None if plain["reading"] is None else LayerReading.from_sums(**plain["reading"])
    return layer


def _add_layer(merged: dict[tuple[str, int], Layer], plain: dict) -> None:
    """Adds one batch's layer to the merged ones, as `Recorder` does on one process."""
    layer = _layer_from_dict(plain)
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


def _pack(x: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
