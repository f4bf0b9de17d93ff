"""What is told of a caught call: the statistics of its weights, if the output rebuilt from them is the model's own.

A layer whose rebuilt output differs from the model's own is not measured, with the reason, never with numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor

import regard
from regard.health.capture.cache_offset import Standing, distance
from regard.health.capture.call import Call, laid_out
from regard.health.capture.interception import step
from regard.health.capture.layer_keys import MANY, Uses
from regard.health.findings.eval_dropout import DROPS
from regard.health.measurement import direct_call
from regard.health.measurement.fidelity import coarsest, difference, limit, sample, unfaithful
from regard.health.measurement.predicted_variance import predict
from regard.health.measurement.query_rows import Rows, Shown
from regard.health.measurement.side_stream import Aside, landed
from regard.health.measurement.value_spread import Ends, ends, spans
from regard.health.readings.layer_reading import LayerReading
from regard.health.what_if import WhatIf
from regard.scores import resolve_scale

HEADS_CHANGE = "its number of heads changes from call to call"
WHOLE = 256  # up to so many queries the model's own output is made in full and goes on; beyond, on sampled rows


@dataclass
class Sight:
    """What one batch told of a layer, until it is known whether the rebuilt output is the model's own."""

    reading: LayerReading
    limit: float
    apart: Tensor | None = None  # [H] the largest relative differences, on the device: asking now would make it wait
    sampled: bool = False  # did the model go on with the rebuilt output?
    what_if: dict[str, LayerReading] = field(default_factory=dict)
    masks: list[Shown] = field(default_factory=list)  # what the masks of its calls show
    values: list[Ends] = field(default_factory=list)  # of its calls
    done: torch.cuda.Event | None = None  # when the reading has all that the batch told, if a GPU takes it aside

    blind: Tensor | None = None  # [H] rows that see no key and are no padding

    def misses(self, keys: Tensor, real: Tensor) -> None:
        """Count them, of a call whose rows see so many keys, [B, H, M]."""
        blind = ((keys == 0) & real[:, None]).sum((0, 2))
        self.blind = blind if self.blind is None else self.blind + blind

    def differs(self, apart: Tensor) -> None:
        self.apart = apart if self.apart is None else torch.maximum(self.apart, apart)


@dataclass
class Layer:
    name: str
    index: int
    use: int = 0  # of the module, within a forward: see `Uses`
    together: bool = False  # are all its uses in this one, for they were too many?
    heads: int = 0
    reading: LayerReading | None = None
    reason: str | None = None  # why it is not measured
    what_if: dict[str, LayerReading] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # what-if -> why it cannot be
    kind: str = ""
    dtype: torch.dtype | None = None
    head_dim: int = 0
    value_dim: int = 0
    scale: float = math.nan  # over 1/√d; NaN where it is learned
    error: float = 0.0  # largest relative difference seen
    sampled: bool = False
    odd: set[str] = field(default_factory=set)  # what is odd in its masks: see `Shown`; and whether it drops weights
    blind: list[int] = field(default_factory=list)  # per head, rows that see no key and are no padding; empty: none
    values: list[tuple[float, float]] = field(default_factory=list)  # per head: see `spans`
    unread: list[int] = field(default_factory=list)  # the heads that nothing behind reads
    not_finite: list[int] = field(default_factory=list)  # the heads that were so, where that is the reason
    folded: bool = False  # were its calls of three dims?
    told: tuple[LayerReading, list] | None = None  # the heads of a reading, told while the model was still at work

    @property
    def label(self) -> str:
        """The name, told apart from that of the module's earlier uses: "att", "att#2"."""
        return self.name if self.use == 0 else f"{self.name}#{self.use + 1}"

    def absorb(self, sight: Sight, apart: float) -> bool:
        """Add what a batch told; True if that took a merge."""
        merged = self.reading is not None
        self.reading = sight.reading if self.reading is None else self.reading.merge(sight.reading)
        for name, reading in sight.what_if.items():
            self.what_if[name] = self.what_if[name].merge(reading) if name in self.what_if else reading
        self.error, self.sampled = max(self.error, apart), self.sampled or sight.sampled
        self.odd |= {name for mask in sight.masks for name, so in mask.odd.items() if bool(so)}
        if sight.blind is not None:
            self.miss(sight.blind.tolist())
        return merged

    def miss(self, blind: list[int]) -> None:
        """Add rows that see no key, per head."""
        self.blind = [a + b for a, b in zip_longest(self.blind, blind, fillvalue=0)]

    def hold(self, values: Sequence[tuple[float, float]]) -> None:
        """Add what is known of the values, per head."""
        pairs = zip_longest(self.values, values, fillvalue=(0.0, 0.0))
        self.values = [(max(a, c), max(b, d)) for (a, b), (c, d) in pairs]

    def join(self, other: Layer) -> None:
        """Add what another use told."""
        self.refused.update(other.refused)
        reason = self.reason or other.reason
        if reason is None and self.reading is not None and other.reading is not None and other.heads != self.heads:
            reason = HEADS_CHANGE
        if reason is not None:
            self.give_up(reason, sorted({*self.not_finite, *other.not_finite}))
        elif other.reading is not None:
            self.absorb(Sight(other.reading, 0.0, sampled=other.sampled, what_if=other.what_if), other.error)
            self.odd |= other.odd
            self.hold(other.values)
            self.miss(other.blind)

    def give_up(self, reason: str, not_finite: Sequence[int] = ()) -> None:
        self.reason, self.reading, self.not_finite = reason, None, list(not_finite)
        self.what_if.clear()


def folded(layers: Iterable[Layer]) -> list[Layer]:
    """The layers, the uses of a module that had `MANY` of them together as one."""
    layers = list(layers)
    many = {layer.name for layer in layers if layer.use == MANY - 1}
    told: dict[tuple[str, int], Layer] = {}
    for layer in layers:
        together = layer.name in many
        key = layer.name, 0 if together else layer.use
        if key in told:
            told[key].join(layer)
        else:
            told[key] = replace(layer, index=len(told), together=together, told=None) if many else layer
    return list(told.values())


class Recorder:
    """An observer that measures: one Layer per module and, where a module is used again, per use: see `Uses`."""

    replaces = True  # may the model go on with a rebuilt output? Only where a batch can be run again: see `settle`

    def __init__(
        self, what_if: Sequence[WhatIf] = (), backend: str | None = None, sequences: int | None = None
    ) -> None:
        self.layers: dict[tuple[str, int], Layer] = {}
        self.what_if, self.backend = what_if, backend
        self.sequences = sequences  # measure no more than so many of each batch
        self.rows, self.standing = Rows(), Standing()
        self.uses = Uses()
        self.key = "", 0  # of the layer whose call is under way
        self._batch: dict[tuple[str, int], Sight] = {}
        self._aside = Aside()

    def begin(self) -> None:
        """A new forward: uses count from 0, masks are new."""
        self.uses.begin()
        self._forget_masks()

    def _forget_masks(self) -> None:
        self.rows.forget()
        self.standing.forget()

    def beside(self):
        """Where readings may be fetched without waiting for what the model still does."""
        return self._aside.after_marked()

    def settle(self) -> bool:
        """After a batch: keep what was faithful, drop what was not; True if the batch must run again.

        It must where the model went on with a rebuilt output that was not its own: what came after saw something else.
        """
        sights, self._batch = {key: sight for key, sight in self._batch.items() if sight.apart is not None}, {}
        with self.beside():
            differences = [x.tolist() for x in landed([s.apart for s in sights.values() if s.apart is not None])]
            values = spans([sight.values for sight in sights.values()], [self.layers[key].heads for key in sights])
        self._aside.join()
        wrong = False
        for (key, sight), heads in zip(sights.items(), differences, strict=True):
            not_finite = [head for head, apart in enumerate(heads) if apart != apart]
            reason = unfaithful(math.nan if not_finite else max(heads, default=0.0), sight.limit)
            if reason is not None:
                self.layers[key].give_up(reason, not_finite)
                wrong |= sight.sampled
        if not wrong:
            for (key, sight), heads, held in zip(sights.items(), differences, values, strict=True):
                layer = self.layers[key]
                if layer.reason is None:
                    layer.hold(held)
                    if layer.absorb(sight, max(heads, default=0.0)):
                        self._aside.mark(sight.apart.device)
        return wrong

    def __call__(self, call: Call, name: str, otherwise: Callable[[], Tensor]) -> Tensor:
        if step() is not self.uses.step:
            self._forget_masks()
        key = self.key = name, self.uses.of(call, name, step())
        layer = self.layers.setdefault(key, Layer(name, len(self.layers), key[1]))
        if layer.reason is not None:
            return otherwise()
        if call.obstacle is not None:
            return self._give_up(key, call.obstacle, otherwise)
        whole, call = call, call if self.sequences is None else call.first(self.sequences)
        try:
            with torch.no_grad():
                rebuilt, stats = self._measure(call)
                rows, shown, real = self.rows.of(call, name)
        except (ValueError, TypeError, NotImplementedError) as error:
            return self._give_up(key, f"regard.attention cannot compute it: {error}", otherwise)
        known = self._batch.get(key)
        if known is not None and known.reading.heads != call.q.shape[1]:
            return self._give_up(key, HEADS_CHANGE, otherwise)
        long = self.replaces and call.sliceable and call.q.shape[2] > WHOLE
        sampled = long and call is whole and not call.dropout and not call.q.requires_grad and real is None
        output = rebuilt if sampled else otherwise()
        with torch.no_grad():
            sight = self._sight(key, call)
            sight.sampled |= sampled
            if call.dropout and not call.module.training:
                layer.odd.add(DROPS)
            if self.standing.in_the_corner(call, name):
                layer.odd.add("corner")
            if shown is not None and shown.odd and not any(shown is mask for mask in sight.masks):
                sight.masks.append(shown)
            if real is not None:
                sight.misses(stats["visible_keys"], real)
            start = self.standing.start(call, name)
            if start:
                stats = {**stats, "distance": distance(call, stats, start, self.backend)}
            self._try(layer, sight, call, rows, start)
            if not sampled:
                self._aside.join()  # an earlier call of this layer may have been read there
                self._read(sight, call, stats, rows, start)
                own = whole.own(None) if call.dropout else output
                sight.differs(difference(own, rebuilt, rows))
                sight.done = None
                self._aside.mark(call.q.device)
                return output
            at = sample(call.q)
            part = rebuilt.index_select(2, at)  # the model may write to the whole
            with self._aside(call.q.device, call, part, rows, stats):
                self._read(sight, call, stats, rows, start)
                sight.differs(difference(call.own(at), part, None if rows is None else rows[:, at]))
            sight.done = self._aside.last(call.q.device)
        return laid_out(rebuilt.to(call.q.dtype))

    def _sight(self, key: tuple[str, int], call: Call) -> Sight:
        if key not in self._batch:
            layer, heads, device = self.layers[key], call.q.shape[1], call.q.device
            layer.heads, layer.folded = heads, call.folded
            layer.kind, layer.dtype = call.kind, coarsest(call.q, call.k, call.v)
            layer.head_dim, layer.value_dim = call.q.shape[-1], call.v.shape[-1]
            scale = resolve_scale(call.options.get("scale"), layer.head_dim)
            layer.scale = math.nan if isinstance(scale, Tensor) else float(scale) * layer.head_dim**0.5
            self._batch[key] = Sight(LayerReading(heads, device), limit(layer.dtype, device))
        return self._batch[key]

    def _measure(self, call: Call):
        if self.backend is None and (quickly := direct_call.attention(call)) is not None:
            return quickly
        q, k, v = (x.detach() for x in (call.q, call.k, call.v))
        return regard.attention(q, k, v, **call.arguments, return_stats=True, backend=self.backend)

    def _read(self, sight: Sight, call: Call, stats: Mapping[str, Tensor], rows: Tensor | None, start: int) -> None:
        sight.reading.update(stats, rows, start)
        predict(sight.reading, call, rows)
        if call.v.numel():
            sight.values.append(ends(call.v))

    def _try(self, layer: Layer, sight: Sight, call: Call, rows: Tensor | None, start: int) -> None:
        """What would be read if the call were changed."""
        for change in self.what_if:
            if change.name in layer.refused:
                continue
            try:
                changed = change(call)
                stats = self._measure(changed)[1]
            except (ValueError, TypeError, NotImplementedError) as error:
                layer.refused[change.name] = str(error)
                continue
            if start:
                stats = {**stats, "distance": distance(changed, stats, start, self.backend)}
            reading = sight.what_if.setdefault(change.name, LayerReading(call.q.shape[1], call.q.device))
            reading.update(stats, rows, start)

    def under_way(self) -> list[tuple[Layer, Sight]]:
        """Layers met for the first time in this batch, whose readings a GPU is still taking, in its order."""
        pairs = [(self.layers[key], sight) for key, sight in self._batch.items() if sight.done is not None]
        return [(layer, sight) for layer, sight in pairs if layer.reading is None and layer.reason is None]

    def _give_up(self, key: tuple[str, int], reason: str, otherwise: Callable[[], Tensor]) -> Tensor:
        self.layers[key].give_up(reason)
        self._batch.pop(key, None)
        return otherwise()
