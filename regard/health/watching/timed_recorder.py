"""Recorders that measure their own cost and never make a training step fail: of all numbers, or the largest logit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard._call.options import is_real
from regard.health.capture.call import Call
from regard.health.capture.forwards import running_frame, uncaptured
from regard.health.checks.finding import LOGIT_LIMIT, HeadList, positional_heads
from regard.health.measure.heads import heads_of
from regard.health.measure.layer_reading import LayerReading
from regard.health.measure.norms import add_norms
from regard.health.measure.postponed import MOST_BYTES, PostponedCall, can_wait, copy_first, measure_together
from regard.health.measure.recorder import HEADS_CHANGE, BatchReading, Layer, Recorder
from regard.health.measure.side_stream import HostCopies, record_event
from regard.health.watching.black_box import as_row, measure_worst_row
from regard.health.watching.sample import AT, WATCHED, fill_max_logits, fill_table

MOST_WORST = 512  # layers whose worst row is kept
ACTIVATIONS = 65536  # of a block that the median is taken of


class TimedRecorder(Recorder):
    """Counts the seconds beyond the model's own; a failed measurement is noted as the layer's reason.

    After each forward `end_forward` measures what was postponed (see `postponed.py`) and starts to fetch the numbers,
    without a wait; `finish_batch` reads them.
    """

    replaces = False

    def __init__(self, sequences: int | None = None) -> None:
        super().__init__(sequences=sequences)
        self.step, self.seconds = 0, 0.0  # that is measured; what opening and closing its interception took
        self.bounded: set[str] = set()  # layers whose soft cap keeps logits within the limit
        self._calls: list[tuple[Moment, Moment]] = []  # where observing a call began and ended
        self._own: list[tuple[Moment, Moment]] = []  # the same of what the model runs within
        self._postponed: list[PostponedCall] = []
        self._bytes = 0  # of their copies
        self._measured: list[tuple[tuple[str, int], BatchReading]] = []  # of postponed calls, by the layer's key
        self._copies = HostCopies()
        self.tokens: Tensor | None = None  # ids that the forward was given
        self._worst: dict[str, list[Tensor]] = {}  # by the layer's label: see `measure_worst_row`
        self._blocks: dict[str, Tensor] = {}  # by the layer's name: see `note_block`
        self._inputs: dict[tuple[str, int], Tensor] = {}  # by the layer's key: NaN or infinite if an input was so

    @property
    def is_on_gpu(self) -> bool:
        """True if a call was on a GPU, which may still be at work on it."""
        return self._is_on_gpu

    def count_seconds(self) -> float:
        """Returns the seconds that measuring took, on the host or on the GPU, whichever was longer; waits for it."""
        host = sum(end.time - begin.time for begin, end in self._calls)
        host -= sum(end.time - begin.time for begin, end in self._own)
        return self.seconds + max(host, _count_gpu_seconds(self._calls) - _count_gpu_seconds(self._own))

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        outputs, model_failed = [], False
        waits = self._can_wait(call, name)
        device = None if waits else call.q.device  # a copy takes no time on a GPU that is worth an event
        self._is_on_gpu |= call.q.is_cuda
        cap, t = call.options.get("softcap"), call.options.get("temperature")
        if cap is not None and (t is None or is_real(t)) and cap / (t or 1.0) <= LOGIT_LIMIT:
            self.bounded.add(name)

        def run_model() -> Tensor:
            nonlocal model_failed
            before = Moment.on(device)
            model_failed = True
            outputs.append(run_original())
            model_failed = False
            self._own.append((before, Moment.on(device)))
            return outputs[-1]

        before = Moment.on(device)
        try:
            output = (self._postpone if waits else self._observe)(call, name, run_model)
        except Exception as error:
            if model_failed:
                raise
            self._note_failure(self.key, error)
            output = outputs[-1] if outputs else run_model()
        if not waits:
            self._side.mark(call.q.device)  # norms and all: what `on_side_stream` may read
        self._calls.append((before, Moment.on(device)))
        return output

    def _note_failure(self, key: tuple[str, int], error: Exception) -> None:
        self.layers[key].mark_unmeasured(f"measuring failed: {type(error).__name__}: {error}")
        self._batch.pop(key, None)

    def _observe(self, call: Call, name: str, run_model: Callable[[], Tensor]) -> Tensor:
        output = super().__call__(call, name, run_model)
        if self.layers[self.key].reason is None and call.obstacle is None:
            small = call.first_sequences(self.sequences)
            self._look_at_inputs(self.key, small)
            add_norms(self._batch[self.key].reading.flat[None], small.q, small.k, small.v)
        return output

    def _can_wait(self, call: Call, name: str) -> bool:
        """True if the call may be measured after the forward: a few sequences of it, all of whose rows count."""
        return self.sequences is not None and can_wait(call, name)

    def _postpone(self, call: Call, name: str, run_model: Callable[[], Tensor]) -> Tensor:
        """Runs the model's call and keeps a copy of its first sequences."""
        layer, key = self._find_layer(call, name), self.key
        if layer.reason is not None:
            return run_model()
        batch, heads, queries, _ = call.q.shape
        sequences = min(batch, self.sequences or batch)
        limit = self._describe(layer, call)
        self.rows.keep_all(sequences, queries)
        self._gated = running_frame(), (sequences, heads, queries, call.v.shape[3]), None
        small, output = copy_first(call, sequences), run_model()
        own = output.detach()[:sequences].clone()
        self._postponed.append(PostponedCall(key, small, own, record_event(own.device), limit))
        self._bytes += self._postponed[-1].bytes
        if self._bytes > MOST_BYTES:
            self._measure_postponed()
        return output

    def _measure_postponed(self) -> None:
        kinds: dict[tuple, list[PostponedCall]] = {}
        for one in self._postponed:
            kinds.setdefault(one.kind, []).append(one)
        self._postponed, self._bytes = [], 0
        for calls in kinds.values():
            device = calls[0].own.device
            with torch.no_grad(), uncaptured(), self._side(device, calls, after=calls[-1].copied):
                before = Moment.on(device)
                try:
                    for one in calls:
                        self._look_at_inputs(one.key, one.call)
                    self._measured += zip(
                        (one.key for one in calls), measure_together(calls, self._measure), strict=True
                    )
                except Exception as error:
                    for one in calls:
                        self._note_failure(one.key, error)
                self._calls.append((before, Moment.on(device)))

    def _look_at_inputs(self, key: tuple[str, int], call: Call) -> None:
        """Keeps whether the inputs are finite, and the row with the largest logit; on the device."""
        with torch.no_grad():
            self._inputs[key] = torch.stack([x.detach().float().sum() for x in (call.q, call.k, call.v)])
            if call.q.numel() and call.k.numel() and len(self._worst) < MOST_WORST:
                self._worst[self.layers[key].label] = measure_worst_row(call)

    def note_block(self, name: str, block: torch.nn.Module, inputs: tuple, output: Any) -> None:
        """Keeps max|x| and the median of |x| over the measured sequences of a block's output; on the device."""
        x = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point() and x.numel():
            before = Moment.on(x.device)
            few = x.detach()[: self.sequences].flatten().abs().float()
            stride = max(1, len(few) // ACTIVATIONS) | 1
            self._blocks[name] = torch.stack([few.amax(), few[::stride].median()])
            self._calls.append((before, Moment.on(x.device)))

    def is_input_lost(self, layer: Layer) -> bool:
        """True if a query, key or value of the layer was not finite; an input alone tells nothing of the output."""
        sums = self._inputs.get((layer.name, layer.use))
        return sums is not None and not bool(sums.isfinite().all())

    def worst_rows(self) -> dict[str, dict]:
        """Returns layer → the row with the largest logit, as plain values; once the numbers are read."""
        kinds = {layer.label: layer.dtype for layer in self.layers.values()}
        return {label: as_row(parts, kinds.get(label)) for label, parts in self._worst.items()}

    def has_measured(self, layer: Layer) -> bool:
        """True if the layer has numbers to log."""
        return layer.reading is not None

    def end_forward(self) -> None:
        """Measures what the forward has left and starts to fetch all numbers, without waiting for the device."""
        self._measure_postponed()
        for layer in self.layers.values():
            if layer.gates is not None:
                self._side.mark(layer.gates.device)
        with self.on_side_stream():
            self._copy_to_host(self._copies)
            self._copies.start()
        self._side.join()
        self._gated = None  # its frame holds the inputs of a module, and with them the model's graph
        self.uses.begin()  # so do those of its uses
        self.rows.forget()

    def _copy_to_host(self, copies: HostCopies) -> None:
        """Adds all tensors that this recorder has on a device."""
        for batch in (*self._batch.values(), *(batch for _, batch in self._measured)):
            batch.reading = LayerReading.from_sums(batch.reading.heads, batch.reading.flat, batch.reading.histogram)
            copies.add_attributes(batch.reading, "flat", "histogram")
            copies.add_attributes(batch, "difference", "empty_rows", "values")
            for mask in batch.masks:
                for name, x in mask.anomalies.items():
                    copies.add(x, partial(setitem, mask.anomalies, name))
        for layer in self.layers.values():
            copies.add_attributes(layer, "gates")
        for found in (self._inputs, self._blocks):
            for key, numbers in found.items():
                copies.add(numbers, partial(setitem, found, key))
        for parts in self._worst.values():
            for at, x in enumerate(parts):
                copies.add(x, partial(setitem, parts, at))
        if self.tokens is not None:
            copies.add(self.tokens, partial(setattr, self, "tokens"))

    def finish_batch(self) -> bool:
        """Reads the numbers of the forward, and keeps those of layers that passed the fidelity check."""
        self._copies.finish()
        for key, batch in self._measured:
            known = self._batch.setdefault(key, batch)
            if known.reading.heads != batch.reading.heads:
                self.layers[key].mark_unmeasured(HEADS_CHANGE)
            elif known is not batch:
                known.add(batch)
        self._measured = []
        return super().finish_batch()

    def fill(self, layer: Layer, table: Tensor) -> None:
        """Writes the numbers of a measured layer into its table."""
        if layer.reading is not None:
            fill_table(table, layer.reading)
        if layer.name in self._blocks:
            table[:, [AT["largest_activation"], AT["median_activation"]]] = self._blocks[layer.name].double()
        if layer.gates is not None:
            count, total, _ = layer.gates
            table[:, AT["gate_rows"]], table[:, AT["gate"]] = count, total / count.clamp_min(1.0)

    def mark_flags(self, layers: list[Layer], tables: dict[int, Tensor]) -> None:
        """Writes the number of each finding (but no notes) into the tables, by the layers' index."""
        heads = HeadList(heads_of(layers))
        if not heads:
            return
        for module in WATCHED:
            find = getattr(module, "find_warnings", None) or getattr(module, "find", None)
            for finding in find(heads) if find is not None else module.find_in_layers(layers):
                if finding.severity != "note":
                    for (index, head), number in zip(finding.places, finding.measured, strict=True):
                        tables[index][head, AT[finding.kind]] = number
        for head in positional_heads(heads)[1]:
            tables[head.index][head.head, AT["positional"]] = 1.0


class MaxLogitRecorder(TimedRecorder):
    """Records the largest logit of every head in one pass over q and k; all uses of a module are one layer."""

    def __init__(self, sequences: int | None = None) -> None:
        super().__init__(sequences)
        self.largest: dict[tuple[str, int], Tensor] = {}  # layer key -> [heads]

    def _observe(self, call: Call, name: str, run_model: Callable[[], Tensor]) -> Tensor:
        self.key = name, 0
        layer = self.layers.setdefault(self.key, Layer(name, len(self.layers)))
        output = run_model()
        if call.obstacle is not None:
            layer.mark_unmeasured(call.obstacle)
            return output
        small = call.first_sequences(self.sequences)
        q, k, v = (x.detach() for x in (small.q, small.k, small.v))
        layer.heads = q.shape[1]
        if q.numel() and k.numel():
            with torch.no_grad():
                stats = regard.attention(q, k, v, **small.arguments, return_stats=("max_logit",))[1]
            largest = stats.max_logit.amax((0, 2)).float()
            known = self.largest.get(self.key, largest)
            self.largest[self.key] = torch.maximum(known, largest)
        return output

    def _can_wait(self, call: Call, name: str) -> bool:
        return False

    def _copy_to_host(self, copies: HostCopies) -> None:
        for key, largest in self.largest.items():
            copies.add(largest, partial(setitem, self.largest, key))
        super()._copy_to_host(copies)

    def finish_batch(self) -> bool:
        self._copies.finish()
        for key, largest in self.largest.items():
            self.layers[key].not_finite = (largest.isnan() | largest.isposinf()).nonzero()[:, 0].tolist()
        return False

    def has_measured(self, layer: Layer) -> bool:
        return (layer.name, 0) in self.largest

    def fill(self, layer: Layer, table: Tensor) -> None:
        fill_max_logits(table, self.largest[layer.name, 0].double())

    def mark_flags(self, layers: list[Layer], tables: dict[int, Tensor]) -> None:
        """Does nothing: the only flag is set in `fill`."""


class Moment(NamedTuple):
    """A moment on the host, and on the GPU's stream where there is one."""

    time: float
    event: torch.cuda.Event | None

    @classmethod
    def on(cls, device: torch.device | None) -> Moment:
        """Returns now, on the host and on a device; without a wait."""
        event = None
        if device is not None and device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            torch.cuda.current_stream(device).record_event(event)
        return cls(time.perf_counter(), event)


def _count_gpu_seconds(spans: Sequence[tuple[Moment, Moment]]) -> float:
    total = 0.0
    for begin, end in spans:
        if begin.event is not None and end.event is not None:
            end.event.synchronize()
            total += begin.event.elapsed_time(end.event) / 1e3
    return total
