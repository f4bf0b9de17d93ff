"""Measures captured calls: statistics of the weights, kept if the output rebuilt from them equals the model's own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

import regard
from regard._call.scores import resolve_scale
from regard.health.capture.call import MAX_USES, Call, UseCounter, forget_derived, in_torch_layout
from regard.health.capture.forwards import forward_token, running_frame, uncaptured
from regard.health.checks.eval_dropout import DROPS
from regard.health.measure import norms, query_rows
from regard.health.measure.designed_scale import have_equal_norms, is_designed
from regard.health.measure.layer_reading import LayerReading
from regard.health.measure.norms import gate_sums, gates_of_heads
from regard.health.measure.side_stream import HostCopies, SideStream, record_event
from regard.health.what_if import WhatIf

HEADS_CHANGE = "its number of heads changes from call to call"
ROOM = 1 / 16  # of a GPU's free memory, which calls may hold until the forward is over
WHOLE = 256  # up to so many queries the model's own output is computed in full; beyond, on sampled rows


@dataclass
class BatchReading:
    """The readings of one layer in one batch, until its rebuilt output has been compared with the model's own."""

    reading: LayerReading
    limit: float
    difference: Tensor | None = None  # [H] the largest relative differences, on the device to save a wait
    sampled: bool = False  # did the model go on with the rebuilt output?
    what_if: dict[str, LayerReading] = field(default_factory=dict)
    masks: list[query_rows.MaskSummary] = field(default_factory=list)  # of its calls, those with anomalies
    values: Tensor | None = None  # [2, G]: see `norms.value_spread`
    done: torch.cuda.Event | None = None  # the end of the reading, if a GPU takes it on the side stream
    empty_rows: Tensor | None = None  # [H] without padding

    def add_empty_rows(self, keys: Tensor, real: Tensor) -> None:
        """Counts the rows [B, M] that should see a key but have 0 visible keys, [B, H, M]."""
        empty = ((keys == 0) & real[:, None]).sum((0, 2))
        self.empty_rows = empty if self.empty_rows is None else self.empty_rows + empty

    def add_difference(self, difference: Tensor) -> None:
        self.difference = difference if self.difference is None else torch.maximum(self.difference, difference)

    def add_values(self, values: Tensor) -> None:
        self.values = values if self.values is None else torch.maximum(self.values, values)

    def add(self, other: BatchReading) -> None:
        """Adds what other calls of the layer were measured to have, by reading, difference and values."""
        self.reading = self.reading.merge(other.reading)
        if other.difference is not None and other.values is not None:
            self.add_difference(other.difference)
            self.add_values(other.values)


@dataclass
class UnreadCall:
    """A call whose output the model goes on with and whose statistics are read later.

    Reading them costs the host as much as computing them. Where the GPU waits for the host, as with small models, that
    is left until the forward is over, if memory allows; where the GPU is behind, it is done at the next call.
    """

    batch: BatchReading
    call: Call
    part: Tensor  # sampled rows of the rebuilt output
    stats: Mapping[str, Tensor]
    rows: Tensor | None
    start: int
    computed: torch.cuda.Event | None  # when the model's stream has got as far


@dataclass
class Layer:
    """One attention module, or one of its uses within a forward, over everything that was examined."""

    name: str
    index: int
    use: int = 0  # of the module, within a forward: see `UseCounter`
    together: bool = False  # are all its uses in this one, because they were too many?
    heads: int = 0
    reading: LayerReading | None = None
    reason: str | None = None  # why it is not measured
    what_if: dict[str, LayerReading] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # what-if -> why it cannot be computed
    kind: str = ""
    dtype: torch.dtype | None = None
    head_dim: int = 0
    value_dim: int = 0
    scale: float = math.nan  # over 1/√d; NaN where it is learned, or meant by the class: see `is_designed`
    error: float = 0.0  # largest relative difference seen
    sampled: bool = False
    anomalies: set[str] = field(default_factory=set)  # of its masks, see `MaskSummary`; and dropout in evaluation
    empty_rows: list[int] = field(default_factory=list)  # per head, without padding; an empty list means none
    values: list[tuple[float, float]] = field(default_factory=list)  # per head: see `norms.value_spread`
    unused_heads: list[int] = field(default_factory=list)  # the heads that nothing reads: see `norms.OutputColumns`
    not_finite: list[int] = field(default_factory=list)  # the heads that were so, where that is the reason
    three_dims: bool = False  # were its calls of three dims?
    most_keys: int = 0  # of a call with several queries
    gates: Tensor | None = None  # sums over its output gates, [3, H]: see `gates.gate_sums`
    early_heads: tuple[LayerReading, list] | None = None  # head readings made while the model was still running

    @property
    def label(self) -> str:
        """The module's name with the number of its use: "att", "att#2"."""
        return self.name if self.use == 0 else f"{self.name}#{self.use + 1}"

    def add_batch(self, batch: BatchReading, difference: float) -> bool:
        """Adds the readings of a batch; True if that took a merge."""
        merged = self.reading is not None
        self.reading = batch.reading if self.reading is None else self.reading.merge(batch.reading)
        for name, reading in batch.what_if.items():
            self.what_if[name] = self.what_if[name].merge(reading) if name in self.what_if else reading
        self.error, self.sampled = max(self.error, difference), self.sampled or batch.sampled
        self.anomalies |= {name for mask in batch.masks for name, was_seen in mask.anomalies.items() if bool(was_seen)}
        if batch.empty_rows is not None:
            self.add_empty_rows(batch.empty_rows.tolist())
        return merged

    def add_empty_rows(self, counts: list[int]) -> None:
        self.empty_rows = [a + b for a, b in zip_longest(self.empty_rows, counts, fillvalue=0)]

    def add_values(self, values: Sequence[tuple[float, float]]) -> None:
        """Adds (spread, size) of the values, per head."""
        pairs = zip_longest(self.values, values, fillvalue=(0.0, 0.0))
        self.values = [(max(a, c), max(b, d)) for (a, b), (c, d) in pairs]

    def add_gates(self, sums: Tensor | None) -> None:
        if sums is not None:
            self.gates = sums if self.gates is None else self.gates + sums.to(self.gates.device)

    def add_use(self, other: Layer) -> None:
        """Adds the readings of another use of the module."""
        self.refused.update(other.refused)
        reason = self.reason or other.reason
        if reason is None and self.reading is not None and other.reading is not None and other.heads != self.heads:
            reason = HEADS_CHANGE
        if reason is not None:
            self.mark_unmeasured(reason, sorted({*self.not_finite, *other.not_finite}))
        elif other.reading is not None:
            self.add_batch(BatchReading(other.reading, 0.0, sampled=other.sampled, what_if=other.what_if), other.error)
            self.anomalies |= other.anomalies
            self.add_values(other.values)
            self.add_empty_rows(other.empty_rows)
            self.add_gates(other.gates)

    def mark_unmeasured(self, reason: str, not_finite: Sequence[int] = ()) -> None:
        """Drops the layer's readings and stores why."""
        self.reason, self.reading, self.not_finite, self.gates = reason, None, list(not_finite), None
        self.what_if.clear()


def merge_uses(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the layers, with the uses of a module that is called `MAX_USES` times or more merged into one."""
    layers = list(layers)
    many = {layer.name for layer in layers if layer.use == MAX_USES - 1}
    if not many:
        return layers
    merged: dict[tuple[str, int], Layer] = {}
    for layer in layers:
        together = layer.name in many
        key = layer.name, 0 if together else layer.use
        if key in merged:
            merged[key].add_use(layer)
        else:
            merged[key] = replace(layer, index=len(merged), together=together, early_heads=None)
    return list(merged.values())


class Recorder:
    """Observes calls and measures them: one Layer per module and use of it."""

    replaces = True  # may the model go on with a rebuilt output? Only where a batch can be run again: `finish_batch`

    def __init__(
        self, what_if: Sequence[WhatIf] = (), backend: str | None = None, sequences: int | None = None
    ) -> None:
        self.layers: dict[tuple[str, int], Layer] = {}
        self.what_if, self.backend = what_if, backend
        self.sequences = sequences  # measure no more than so many of each batch
        self.rows, self.uses = query_rows.QueryRows(), UseCounter()
        self.key = "", 0  # of the layer that is being measured
        self._gated: tuple | None = None  # the last call: its frame, its output's shape, the rows that count
        self._batch: dict[tuple[str, int], BatchReading] = {}
        self._unread: list[UnreadCall] = []
        self._room: dict[torch.device, float] = {}  # see `_most_bytes`
        self._is_on_gpu = False  # was a call on a GPU, which may still be at work on it?

    @cached_property
    def _side(self) -> SideStream:
        return SideStream()

    def begin(self) -> None:
        """Begins a forward: uses count from 0, masks are new, and caches may be written to."""
        if self._unread:
            self._read_unread()
            self._side.join()
        self.uses.begin()
        self.rows.forget()
        forget_derived()

    def on_side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block in which readings are fetched without waiting for what the model still does."""
        self._read_unread()
        return self._side.after_marks() if self._is_on_gpu else contextlib.nullcontext()

    def finish_batch(self) -> bool:
        """Keeps the readings of layers that passed the fidelity check; True if the batch must run again.

        It must where the model went on with a rebuilt output that was not its own: later layers saw something else.
        """
        self._read_unread()  # which sets differences
        batch, self._batch = {key: one for key, one in self._batch.items() if one.difference is not None}, {}
        if self._is_on_gpu:
            copies = HostCopies()
            for one in batch.values():
                copies.add_attributes(one, "difference", "values")
            with self.on_side_stream():
                copies.start()
            copies.finish()
            self._side.join()
        differences = [one.difference.tolist() for one in batch.values() if one.difference is not None]
        must_repeat = False
        for (key, one), heads in zip(batch.items(), differences, strict=True):
            not_finite = [head for head, difference in enumerate(heads) if difference != difference]
            reason = norms.explain_difference(math.nan if not_finite else max(heads, default=0.0), one.limit)
            if reason is not None:
                self.layers[key].mark_unmeasured(reason, not_finite)
                must_repeat |= one.sampled
        if not must_repeat:
            for (key, one), heads in zip(batch.items(), differences, strict=True):
                layer = self.layers[key]
                if layer.reason is None:
                    if one.values is not None:
                        layer.add_values(one.values.repeat_interleave(layer.heads // one.values.shape[1], 1).T.tolist())
                    if layer.add_batch(one, max(heads, default=0.0)) and self._is_on_gpu:
                        self._side.mark(one.reading.flat.device)
        return must_repeat

    def _find_layer(self, call: Call, name: str) -> Layer:
        """Returns the layer that a call belongs to, and makes it the one that is being measured."""
        token = forward_token()
        if token is not self.uses.token:
            self.rows.forget()
        key = self.key = name, self.uses.count(call, name, token)
        if key not in self.layers:
            self.layers[key] = Layer(name, len(self.layers), key[1])
        return self.layers[key]

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        layer, key = self._find_layer(call, name), self.key
        self._is_on_gpu |= call.q.is_cuda
        if layer.reason is not None:
            return run_original()
        if call.obstacle is not None:
            return self._mark_unmeasured(key, call.obstacle, run_original)
        whole, call = call, call.first_sequences(self.sequences)
        try:
            with torch.no_grad():
                start = query_rows.first_query_position(call, name)
                rebuilt, stats = self._measure_from(call, start)
                rows, mask, real = self.rows.select(call, name)
        except (ValueError, TypeError, NotImplementedError) as error:
            return self._mark_unmeasured(key, f"regard.attention cannot compute it: {error}", run_original)
        batch = self._batch.get(key)
        if batch is not None and batch.reading.heads != call.q.shape[1]:
            return self._mark_unmeasured(key, HEADS_CHANGE, run_original)
        self._gated = running_frame(), (*call.q.shape[:3], call.v.shape[3]), rows
        if call.options.get("gate") is not None:
            self.add_gate(name, torch.sigmoid(call.options["gate"].detach().float()))
        is_long = self.replaces and call.sliceable and call.q.shape[2] > WHOLE
        sampled = is_long and call is whole and not call.dropout and not call.q.requires_grad and real is None
        output = rebuilt if sampled else run_original()
        with torch.no_grad():
            if batch is None:
                reading = LayerReading(call.q.shape[1], call.q.device)
                batch = self._batch[key] = BatchReading(reading, self._describe(layer, call))
            batch.sampled |= sampled
            if call.dropout and not call.module.training:
                layer.anomalies.add(DROPS)
            if query_rows.hides_cached_keys(call, name):
                layer.anomalies.add("corner")
            if mask is not None and mask.anomalies and not any(mask is one for one in batch.masks):
                batch.masks.append(mask)
            if real is not None:
                batch.add_empty_rows(stats["visible_keys"], real)
            self._measure_what_if(layer, batch, call, rows, start)
            if not sampled:
                self._read_unread()
                if self._is_on_gpu:
                    self._side.join()  # an earlier call of this layer may have been read there
                self._read(batch, call, stats, rows, start)
                own = whole.own(None) if call.dropout else output
                batch.add_difference(norms.relative_difference(own, rebuilt, rows))
                batch.done = None
                if self._is_on_gpu:
                    self._side.mark(call.q.device)
                return output
            device, before = call.q.device, self._unread[-1].computed if self._unread else None
            part = rebuilt.index_select(2, norms.sampled_rows(call.q.shape[2], device))  # the model may write to it all
            is_behind = before is not None and not before.query()
            self._unread.append(UnreadCall(batch, call, part, stats, rows, start, record_event(device)))
            held = call.q.nbytes + call.k.nbytes + call.v.nbytes + len(stats) * stats["entropy"].nbytes
            is_full = held * len(self._unread) > self._most_bytes(device)
            if is_behind or is_full or torch.is_autocast_enabled(device.type):  # `own` may need autocast
                self._read_unread()
        return in_torch_layout(rebuilt.to(call.q.dtype))

    def _most_bytes(self, device: torch.device) -> float:
        """Returns how much memory of a device unread calls may hold; on a CPU none, where nothing is gained."""
        if device not in self._room:
            self._room[device] = ROOM * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0.0
        return self._room[device]

    def _read_unread(self) -> None:
        """Reads the calls that were left for later, each after the model's stream has computed it."""
        unread, self._unread = self._unread, []
        for one in unread:
            device = one.call.q.device
            with torch.no_grad(), uncaptured(), self._side(device, one, after=one.computed):
                self._read(one.batch, one.call, one.stats, one.rows, one.start)
                at = norms.sampled_rows(one.call.q.shape[2], device)
                counted = None if one.rows is None else one.rows[:, at]
                one.batch.add_difference(norms.relative_difference(one.call.own(at), one.part, counted))
            one.batch.done = self._side.last_event(device)

    def add_gate(self, name: str, gates: Tensor) -> None:
        """Reads the gate of the last call if it is that of module `name`, in the same forward, and fits its output."""
        if self._gated is None or self.key[0] != name or self._gated[0] is not running_frame():
            return
        layer, (_, shape, rows) = self.layers[self.key], self._gated
        whole = gates_of_heads(gates, (len(gates), *shape[1:])) if gates.ndim > 2 and layer.reason is None else None
        if whole is not None and len(whole) >= shape[0]:
            layer.add_gates(gate_sums(whole[: shape[0]], rows))
            self._gated = None  # one gate for each call

    def _describe(self, layer: Layer, call: Call) -> float:
        """Stores what a call tells of its layer; returns the largest relative difference that it may have."""
        layer.heads, layer.three_dims = call.q.shape[1], call.three_dims
        layer.kind, layer.dtype = call.kind, norms.coarsest_dtype(call.q, call.k, call.v)
        layer.head_dim, layer.value_dim = call.q.shape[-1], call.v.shape[-1]
        layer.most_keys = call.k.shape[2] * (call.q.shape[2] > 1)
        scale = resolve_scale(call.options.get("scale"), layer.head_dim)
        layer.scale = math.nan
        if not isinstance(scale, Tensor) and not is_designed(call.module, float(scale)):
            factor = float(scale) * layer.head_dim**0.5
            layer.scale = factor if 0.5 < factor < 2.0 or not have_equal_norms(call.q, call.k) else math.nan
        return norms.tolerance(call.rounded or layer.dtype, call.q.device)

    def _measure(self, call: Call) -> tuple[Tensor, Mapping[str, Tensor]]:
        q, k, v = (x.detach() for x in (call.q, call.k, call.v))
        return regard.attention(q, k, v, **call.arguments, return_stats=True, backend=self.backend)

    def _measure_from(self, call: Call, start: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the output and the statistics of a call whose first query stands at `start`."""
        output, stats = self._measure(call)
        if start:
            stats = {**stats, "distance": query_rows.distance_from(call, stats, start, self.backend)}
        return output, stats

    def _read(self, batch: BatchReading, call: Call, stats: Mapping, rows: Tensor | None, start: int) -> None:
        batch.reading.update(stats, rows, start)
        norms.add_predicted_variance(batch.reading, call, rows)
        if call.v.numel():
            batch.add_values(norms.value_spread(call.v)[:, 0])

    def _measure_what_if(self, layer: Layer, batch: BatchReading, call: Call, rows: Tensor | None, start: int) -> None:
        for change in self.what_if:
            if change.name in layer.refused:
                continue
            try:
                stats = self._measure_from(change(call), start)[1]
            except (ValueError, TypeError, NotImplementedError) as error:
                layer.refused[change.name] = str(error)
                continue
            reading = batch.what_if.setdefault(change.name, LayerReading(call.q.shape[1], call.q.device))
            reading.update(stats, rows, start)

    def pending_layers(self) -> list[tuple[Layer, BatchReading, torch.cuda.Event]]:
        """Returns the layers measured for the first time in this batch that a GPU is still reading, and its events."""
        self._read_unread()
        known = ((self.layers[key], one, one.done) for key, one in self._batch.items())
        return [(a, b, done) for a, b, done in known if done is not None and a.reading is None and a.reason is None]

    def _mark_unmeasured(self, key: tuple[str, int], reason: str, run_original: Callable[[], Tensor]) -> Tensor:
        self.layers[key].mark_unmeasured(reason)
        self._batch.pop(key, None)
        return run_original()
