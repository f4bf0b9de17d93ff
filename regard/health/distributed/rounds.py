"""A corpus examined by many ranks: batch n runs on rank n mod W, and after every W batches rank 0 merges the readings.

Readings are merged batch by batch in the order of the corpus, whichever rank measured them: any number of ranks gives
the same bits. After a round the merged readings may be written down (`snapshot`), and an examination that was broken
off goes on after the last batch in it, on as many ranks as there are then.

    rank 0 holds     the merged layers, the number of batches in them
    the others       nothing beyond their own round
"""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from regard.health.distributed.checksums import batch_mark
from regard.health.measurement.recorder import Layer, Recorder
from regard.health.readings.layer_reading import LayerReading
from regard.health.report import files
from regard.parallel.failures import RankError
from regard.parallel.group import RankGroup
from regard.parallel.handshake import compare_calls

SECONDS = 5.0  # between two snapshots


class RoundError(RuntimeError):
    """A batch failed on one of the ranks: told to all of them."""


class SnapshotError(ValueError):
    """The snapshot is of other data, or cannot be read or written."""


class Rounds:
    """What `regard.examine(group=…, snapshot=…)` does between batches."""

    def __init__(self, recorder: Recorder, group, snapshot: str | os.PathLike | None, what: dict):
        self.recorder = recorder
        self.line = RankGroup.from_torch(None if group is True else group) if group is not None else None
        self.rank, self.world = (0, 1) if self.line is None else (self.line.rank, self.line.world)
        self.path = None if snapshot is None else Path(snapshot)
        self.what = what
        self.merged: dict[tuple[str, int], Layer] = {}
        self.done, self.written = 0, 0.0
        self.data = self.known = 0  # the mark of all batches so far, and of those in the snapshot
        self._resume()
        self.start = self.done

    def saw(self, number: int, batch) -> None:
        """Every rank calls this before each batch: those that the snapshot has must be the same again."""
        if self.path is None:
            return
        self.data = batch_mark(batch, self.data)
        if number + 1 == self.start and self.data != self.known:
            raise self._other(f"its {self.start} batches are not the first {self.start} of these")

    def _other(self, why: str) -> SnapshotError:
        return SnapshotError(f"snapshot {str(self.path)!r} is of another examination ({why}); remove it")

    def mine(self, number: int) -> bool:
        return number >= self.start and (number - self.start) % self.world == self.rank

    def after(self, number: int) -> None:
        """Every rank calls this after each batch, its own or not; the last of a round is where they meet."""
        if number >= self.start and (number + 1 - self.start) % self.world == 0:
            self.meet(number)

    def failed(self, number: int, error: BaseException) -> tuple[Exception, int]:
        """What ends the examination on every rank: (the error, how many batches are in the merged readings).

        A lost rank, or Ctrl-C, is raised at once: the others cannot be met any more.
        """
        if isinstance(error, (RankError, SnapshotError)) or not isinstance(error, Exception):
            raise error
        if not isinstance(error, RoundError):
            try:
                self.meet(number, error)
            except RoundError as told:
                error = told
        return error, self.done

    def meet(self, number: int, failure: Exception | None = None, last: bool = False) -> None:
        """Everybody's batch of this round to rank 0. What failed on any rank is raised on all."""
        told: dict = {"error": None if failure is None else f"{type(failure).__name__}: {failure}", "layers": []}
        told["layers"] = [_told(layer) for layer in self.recorder.layers.values()]
        for layer in self.recorder.layers.values():  # the next round's readings are its own
            layer.reading, layer.error, layer.blind = None, 0.0, []
            layer.what_if.clear()
        told["count"] = number + 1 if last else sys.maxsize  # of all batches, where they have come to an end
        everyone = self._gathered(told, number)
        errors = [(rank, x["error"]) for rank, x in enumerate(everyone) if x["error"] is not None]
        first = errors[0][0] if errors else self.world
        for rank, x in enumerate(everyone):
            if rank < first:
                for layer in x["layers"]:
                    _absorb(self.merged, layer)
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
        """Every rank calls this after the last batch: for the round that was not full, and what failed since the last.

        Whoever has failed is waiting for the others' next meeting, so that there is always one more.
        """
        if count < self.start:
            raise self._other(f"it has {self.start} batches, these are {count}")
        self.meet(count - 1, last=True)

    def finish(self) -> list[Layer]:
        """After all have met: the same merged layers on every rank."""
        layers = self.layers()
        if self.path is not None and self.rank == 0:
            self.path.unlink(missing_ok=True)  # whole: nothing to resume
        return layers

    def layers(self) -> list[Layer]:
        """What is merged so far, the same on every rank."""
        merged: dict[tuple[str, int], Layer] = {}
        for layer in self._shared([_told(layer) for layer in self.merged.values()]):
            _absorb(merged, layer)
        return list(merged.values())

    def _gathered(self, told: dict, number: int) -> list[dict]:
        """What every rank told, at rank 0 whole; elsewhere only the errors and counts."""
        if self.line is None or self.world == 1:
            return [told]
        step = "examine batch"
        packed = _packed(told)
        sizes = self.line.all_gather_numbers([packed.numel(), told["error"] is not None, told["count"]], step, number)
        found = []
        for rank, (size, _, count) in enumerate(sizes):
            if rank == self.rank:
                found.append(told)
                if rank:
                    self.line.send_receive(packed, None, 0, 0, step, number).wait()
            elif self.rank == 0:
                room = torch.empty(size, dtype=torch.uint8)
                found.append(_unpacked(self.line.send_receive(None, room, rank, rank, step, number).wait()))
            else:
                found.append({"error": None, "layers": [], "count": count})
        failed = [rank for rank, (_, wrong, _) in enumerate(sizes) if wrong]
        if failed:
            texts = self._shared([x["error"] for x in found])
            for x, text in zip(found, texts, strict=True):
                x["error"] = text
        return found

    def _shared(self, x):
        """Rank 0's x on every rank."""
        if self.line is None or self.world == 1:
            return x
        packed = _packed(x)
        ((size, *_), *_) = self.line.all_gather_numbers([packed.numel()], "examine end")
        packed = packed if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        return _unpacked(self.line.broadcast(packed, 0, "examine end"))

    def _write(self) -> None:
        now = time.monotonic()
        if self.path is None or self.rank != 0 or (self.written and now - self.written < SECONDS):
            return
        self.written = now
        content = {"what": self.what, "done": self.done, "data": self.data}
        content["layers"] = [_told(layer) for layer in self.merged.values()]
        written = io.BytesIO()
        torch.save(content, written)
        files.write(self.path, written.getvalue())

    def _resume(self) -> None:
        """Rank 0 reads the snapshot, if there is one, and tells the others how far it goes."""
        content = None
        failure: Exception | None = None
        if self.path is not None and self.rank == 0:
            try:
                content = self._read(self.path)
            except Exception as error:
                failure = error
        if content is not None:
            for layer in content["layers"]:
                _absorb(self.merged, layer)
            self.done, self.known = content["done"], content["data"]
        if self.line is not None:
            alike = {f"with different {name}": value for name, value in self.what.items()}
            alike["with and without a snapshot"] = self.path is None
            self.done, self.known = compare_calls(self.line, "examine", [self.done, self.known], alike, failure)[0]
        elif failure is not None:
            raise failure

    def _read(self, path: Path) -> dict | None:
        """What a snapshot holds, if there is one."""
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
            raise self._other(f"{named} differ")
        return content


def _told(layer: Layer) -> dict:
    """A layer as plain numbers and tensors."""
    told = {field.name: getattr(layer, field.name) for field in fields(Layer)}
    told["dtype"] = None if layer.dtype is None else str(layer.dtype).removeprefix("torch.")
    told["reading"] = None if layer.reading is None else _numbers(layer.reading)
    told["what_if"] = {name: _numbers(reading) for name, reading in layer.what_if.items()}
    told["refused"], told["odd"] = dict(layer.refused), sorted(layer.odd)
    return told


def _numbers(reading: LayerReading) -> dict:
    reading = reading.cpu()
    return dict(heads=reading.heads, flat=reading.flat, histogram=reading.histogram)


def _reading(told: dict) -> LayerReading:
    reading = LayerReading(told["heads"])
    reading.flat.copy_(told["flat"])
    reading.histogram.copy_(told["histogram"])
    return reading


def _absorb(merged: dict[tuple[str, int], Layer], told: dict) -> None:
    """One batch's layer joins the merged ones, as `Layer.absorb` does on one process."""
    key = told["name"], told["use"]
    if key not in merged:
        merged[key] = Layer(told["name"], len(merged), told["use"])
    layer = merged[key]
    layer.refused.update(told["refused"])
    layer.odd.update(told["odd"])
    if layer.reason is not None:
        return
    layer.heads = told["heads"] or layer.heads
    if told["reason"] is not None:
        layer.give_up(told["reason"], told["not_finite"])
        return
    layer.kind = told["kind"] or layer.kind
    layer.folded = told["folded"]
    layer.head_dim, layer.scale = told["head_dim"] or layer.head_dim, told["scale"]
    layer.value_dim = told["value_dim"] or layer.value_dim
    layer.dtype = layer.dtype if told["dtype"] is None else getattr(torch, told["dtype"])
    layer.miss(told["blind"])
    layer.hold(told["values"])
    if told["reading"] is not None:
        reading = _reading(told["reading"])
        layer.reading = reading if layer.reading is None else layer.reading.merge(reading)
    for name, numbers in told["what_if"].items():
        reading = _reading(numbers)
        layer.what_if[name] = layer.what_if[name].merge(reading) if name in layer.what_if else reading
    layer.error, layer.sampled = max(layer.error, told["error"]), layer.sampled or told["sampled"]


def _packed(x) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor):
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
