"""A recorder that measures its own cost and never makes a training step fail."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.measurement.recorder import Layer, Recorder
from regard.health.watching.flags import mark_flags
from regard.health.watching.sample import AT, fill_table

Norms = dict[str, tuple[Tensor, int]]  # "q_norm", … -> sums over rows [heads], rows


class TimedRecorder(Recorder):
    """Counts the seconds beyond the model's own; a failed measurement is noted as the layer's reason.

    `norms`: layer key → norms of q, k and v.
    """

    seconds = 0.0
    replaces = False

    def __init__(self, sequences: int | None = None) -> None:
        super().__init__(sequences=sequences)
        self.norms: dict[tuple[str, int], Norms] = {}

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        own, outputs, model_failed = 0.0, [], False

        def run_model() -> Tensor:
            nonlocal own, model_failed
            before = _synchronized_time(call.q)
            model_failed = True
            outputs.append(run_original())
            model_failed = False
            own += _synchronized_time(call.q) - before
            return outputs[-1]

        before = _synchronized_time(call.q)
        try:
            output = self._observe(call, name, run_model)
        except Exception as error:
            if model_failed:
                raise
            self.layers[self.key].mark_unmeasured(f"measuring failed: {type(error).__name__}: {error}")
            self._batch.pop(self.key, None)
            output = outputs[-1] if outputs else run_model()
        self.seconds += _synchronized_time(call.q) - before - own
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

    def fill(self, layer: Layer, table: Tensor) -> None:
        """Writes the numbers of a measured layer into its table."""
        if layer.reading is not None:
            fill_table(table, layer.reading.cpu(), self.norms_of(layer))
        if layer.gates is not None:
            count, total, _ = layer.gates.cpu()
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


def _synchronized_time(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
