"""A recorder that measures its own cost and never makes a training step fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.measurement.recorder import Layer, Recorder
from regard.health.measurement.side_stream import fetch_to_host
from regard.health.readings.layer_reading import LayerReading
from regard.health.watching.flags import mark_flags
from regard.health.watching.sample import AT, fill_table

Norms = dict[str, tuple[Tensor, int]]  # "q_norm", … -> sums over rows [heads], rows


class TimedRecorder(Recorder):
    """Counts the seconds beyond the model's own; a failed measurement is noted as the layer's reason.

    `norms`: layer key → norms of q, k and v.
    """

    replaces = False

    def __init__(self, sequences: int | None = None) -> None:
        super().__init__(sequences=sequences)
        self.norms: dict[tuple[str, int], Norms] = {}
        self._calls: list[tuple[Moment, Moment]] = []  # where observing a call began and ended
        self._own: list[tuple[Moment, Moment]] = []  # the same of what the model runs within

    @property
    def is_on_gpu(self) -> bool:
        """True if a call was on a GPU, which may still be at work on it."""
        return any(end.event is not None for _, end in self._calls)

    def count_seconds(self) -> float:
        """Returns the seconds that measuring took, on the host or on the GPU, whichever was longer; waits for it."""
        host = sum(end.time - begin.time for begin, end in self._calls)
        host -= sum(end.time - begin.time for begin, end in self._own)
        return max(host, _count_gpu_seconds(self._calls) - _count_gpu_seconds(self._own))

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        outputs, model_failed = [], False

        def run_model() -> Tensor:
            nonlocal model_failed
            before = Moment.of(call.q)
            model_failed = True
            outputs.append(run_original())
            model_failed = False
            self._own.append((before, Moment.of(call.q)))
            return outputs[-1]

        before = Moment.of(call.q)
        try:
            output = self._observe(call, name, run_model)
        except Exception as error:
            if model_failed:
                raise
            self.layers[self.key].mark_unmeasured(f"measuring failed: {type(error).__name__}: {error}")
            self._batch.pop(self.key, None)
            output = outputs[-1] if outputs else run_model()
        self._side.mark(call.q.device)  # norms and all: what `on_side_stream` may read
        self._calls.append((before, Moment.of(call.q)))
        return output

    def _observe(self, call: Call, name: str, run_model: Callable[[], Tensor]) -> Tensor:
        output = super().__call__(call, name, run_model)
        if self.layers[self.key].reason is None and call.obstacle is None:
            self._add_norms(call if self.sequences is None else call.first_sequences(self.sequences))
        return output

    def _add_norms(self, call: Call) -> None:
        known, heads = self.norms.setdefault(self.key, {}), call.q.shape[1]
        for name, x in (("q_norm", call.q), ("k_norm", call.k), ("v_norm", call.v)):
            sums = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32).sum((0, 2))
            sums = sums.repeat_interleave(heads // len(sums))
            before, rows = known.get(name, (0.0, 0))
            known[name] = before + sums, rows + x.shape[0] * x.shape[2]

    def has_measured(self, layer: Layer) -> bool:
        """True if the layer has numbers to log."""
        return layer.reading is not None

    def finish_batch(self) -> bool:
        """Keeps the readings of layers that passed the fidelity check, and brings them to the CPU."""
        super().finish_batch()
        with self.on_side_stream():
            layers = [layer for layer in self.layers.values() if layer.reading is not None]
            readings = [layer.reading for layer in layers if layer.reading is not None]
            if readings:
                flat = fetch_to_host([reading.flat for reading in readings])
                histograms = fetch_to_host([reading.histogram.flatten() for reading in readings])
                for layer, reading, sums, bins in zip(layers, readings, flat, histograms, strict=True):
                    layer.reading = LayerReading.from_sums(reading.heads, sums, bins.view(reading.histogram.shape))
            for layer in layers:
                layer.gates = None if layer.gates is None else layer.gates.cpu()
            totals = [x for known in self.norms.values() for x, _ in known.values()]
            fetched = iter(fetch_to_host(totals) if totals else ())
            for known in self.norms.values():
                known.update({name: (next(fetched), rows) for name, (_, rows) in known.items()})
        return False

    def fill(self, layer: Layer, table: Tensor) -> None:
        """Writes the numbers of a measured layer into its table."""
        if layer.reading is not None:
            fill_table(table, layer.reading, self.norms_of(layer))
        if layer.gates is not None:
            count, total, _ = layer.gates
            table[:, AT["gate_rows"]], table[:, AT["gate"]] = count, total / count.clamp_min(1.0)

    def mark_flags(self, layers: list[Layer], tables: dict[int, Tensor]) -> None:
        """Writes the findings of all heads into the tables, by the layers' index."""
        mark_flags(layers, tables)

    def norms_of(self, layer: Layer) -> Norms:
        """Returns the norms of a layer; those of all uses where they were merged."""
        found: Norms = {}
        for (name, use), known in self.norms.items():
            if name == layer.name and (layer.together or use == layer.use):
                for norm, (sums, rows) in known.items():
                    before, count = found.get(norm, (0.0, 0))
                    found[norm] = before + sums, count + rows
        return found


class Moment(NamedTuple):
    """A moment on the host, and on the GPU's stream where there is one."""

    time: float
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, x: Tensor) -> Moment:
        """Returns now, on the device of x; without a wait."""
        event = None
        if x.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            torch.cuda.current_stream(x.device).record_event(event)
        return cls(time.perf_counter(), event)


def _count_gpu_seconds(spans: Sequence[tuple[Moment, Moment]]) -> float:
    total = 0.0
    for begin, end in spans:
        if begin.event is not None and end.event is not None:
            end.event.synchronize()
            total += begin.event.elapsed_time(end.event) / 1e3
    return total
