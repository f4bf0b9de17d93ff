"""What is told of a caught call: the statistics of its weights, if the output rebuilt from them is the model's own.

A layer whose rebuilt output differs from the model's own is not measured, with the reason, never with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import regard
from regard.health.call import Call, Rows
from regard.health.readings import LayerReading
from regard.health.what_if import WhatIf
from regard.scores import resolve_scale

WHOLE = 256  # up to so many queries the model's own output is made in full and goes on; beyond, on sampled rows
SAMPLED = 64
PREDICTED = 1024  # rows and keys whose norms are taken, at least
# relative difference of one head's output, as the square root of the sums of squares
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
GPU_FLOAT32 = 5e-3  # products in TF32


@dataclass
class Sight:
    """What one batch told of a layer, until it is known whether the rebuilt output is the model's own."""

    reading: LayerReading
    apart: Tensor  # the largest relative difference so far, on the device: asking for it now would make the GPU wait
    limit: float
    sampled: bool  # did the model go on with the rebuilt output?
    what_if: dict[str, LayerReading] = field(default_factory=dict)


@dataclass
class Layer:
    name: str
    index: int
    reading: LayerReading | None = None
    reason: str | None = None  # why it is not measured
    what_if: dict[str, LayerReading] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # what-if -> why it cannot be
    kind: str = ""
    dtype: torch.dtype | None = None
    error: float = 0.0  # largest relative difference seen
    sampled: bool = False

    def absorb(self, sight: Sight, apart: float) -> None:
        self.reading = sight.reading if self.reading is None else self.reading.merge(sight.reading)
        for name, reading in sight.what_if.items():
            self.what_if[name] = self.what_if[name].merge(reading) if name in self.what_if else reading
        self.error, self.sampled = max(self.error, apart), self.sampled or sight.sampled

    def give_up(self, reason: str) -> None:
        self.reason, self.reading = reason, None
        self.what_if.clear()


class Recorder:
    """An observer that measures: one Layer per module and, where a module is used again, per use within a forward."""

    def __init__(
        self, what_if: Sequence[WhatIf] = (), backend: str | None = None, sequences: int | None = None
    ) -> None:
        self.layers: dict[tuple[str, int], Layer] = {}
        self.what_if, self.backend = what_if, backend
        self.sequences = sequences  # measure no more than so many of each batch
        self.rows = Rows()
        self._uses: dict[str, int] = {}
        self._batch: dict[tuple[str, int], Sight] = {}

    def begin(self) -> None:
        """A new forward: uses count from 0, masks are new."""
        self._uses.clear()
        self.rows.forget()

    def settle(self) -> bool:
        """After a batch: keep what was faithful, drop what was not; True if the batch must run again.

        It must where the model went on with a rebuilt output that was not its own: what came after saw something else.
        """
        sights, self._batch = self._batch, {}
        differences = _numbers([sight.apart for sight in sights.values()])
        wrong = False
        for (key, sight), apart in zip(sights.items(), differences, strict=True):
            reason = _unfaithful(apart, sight.limit)
            if reason is not None:
                self.layers[key].give_up(reason)
                wrong |= sight.sampled
        if not wrong:
            for (key, sight), apart in zip(sights.items(), differences, strict=True):
                if self.layers[key].reason is None:
                    self.layers[key].absorb(sight, apart)
        return wrong

    def __call__(self, call: Call, name: str, otherwise: Callable[[], Tensor]) -> Tensor:
        use = self._uses.get(name, 0)
        self._uses[name] = use + 1
        key = name, use
        layer = self.layers.setdefault(key, Layer(name, len(self.layers)))
        if layer.reason is not None:
            return otherwise()
        if call.obstacle is not None:
            return self._give_up(key, call.obstacle, otherwise)
        whole, call = call, call if self.sequences is None else call.first(self.sequences)
        try:
            with torch.no_grad():
                rebuilt, stats = self._measure(call)
                rows = self.rows.of(call, name)
        except (ValueError, TypeError, NotImplementedError) as error:
            return self._give_up(key, f"regard.attention cannot compute it: {error}", otherwise)
        sight = self._sight(key, call)
        if sight.reading.heads != call.q.shape[1]:
            return self._give_up(key, "its number of heads changes from call to call", otherwise)
        long = call.sliceable and call.q.shape[2] > WHOLE
        sampled = long and call is whole and not call.dropout and not call.q.requires_grad
        output = None if sampled else otherwise()
        with torch.no_grad():
            own = None if sampled else whole.own(None) if call.dropout else output
            sight.apart = torch.maximum(sight.apart, self._difference(call, rebuilt, own, rows))
            sight.sampled |= sampled
            self._record(layer, sight, call, stats, rows)
        return rebuilt.to(call.q.dtype) if output is None else output

    def _sight(self, key: tuple[str, int], call: Call) -> Sight:
        if key not in self._batch:
            layer, heads, device = self.layers[key], call.q.shape[1], call.q.device
            layer.kind, layer.dtype = call.kind, call.q.dtype
            on_gpu = (call.q.dtype, call.q.is_cuda) == (torch.float32, True)
            limit = GPU_FLOAT32 if on_gpu else TOLERANCE[call.q.dtype]
            self._batch[key] = Sight(LayerReading(heads, device), torch.zeros((), device=device), limit, False)
        return self._batch[key]

    def _measure(self, call: Call):
        q, k, v = (x.detach() for x in (call.q, call.k, call.v))
        return regard.attention(q, k, v, **call.arguments, return_stats=True, backend=self.backend)

    def _difference(self, call: Call, rebuilt: Tensor, own: Tensor | None, rows: Tensor | None) -> Tensor:
        """The largest relative difference over heads, on the rows that count; `own` None: on a sample of them."""
        if own is None:
            queries = call.q.shape[2]
            at = torch.linspace(0, queries - 1, SAMPLED, device=call.q.device).round().long()
            own, rebuilt = call.own(at), rebuilt.index_select(2, at)
            rows = None if rows is None else rows[:, at]
        own, rebuilt = own[: len(rebuilt)].detach().float(), rebuilt.float()
        if rows is not None:
            hidden = ~rows[:, None, :, None]
            own, rebuilt = own.masked_fill(hidden, 0.0), rebuilt.masked_fill(hidden, 0.0)
        size = own.square().sum((0, 2, 3)).sqrt()
        apart = (own - rebuilt).square().sum((0, 2, 3)).sqrt()
        return (apart / torch.where(size > 0, size, 1.0)).max() if own.numel() else apart.sum()

    def _record(self, layer: Layer, sight: Sight, call: Call, stats: dict[str, Tensor], rows: Tensor | None) -> None:
        queries, keys = call.q.shape[2], call.k.shape[2]
        cached = queries < keys and bool(getattr(call.module, "is_causal", False))
        start = keys - queries if cached else 0
        scale = resolve_scale(call.options.get("scale"), call.q.shape[-1])
        sight.reading.update(stats, rows, predicted_variance(call, rows, scale), start)
        for change in self.what_if:
            if change.name in layer.refused:
                continue
            try:
                other = self._measure(change(call))[1]
            except (ValueError, TypeError, NotImplementedError) as error:
                layer.refused[change.name] = str(error)
                continue
            reading = sight.what_if.setdefault(change.name, LayerReading(call.q.shape[1], call.q.device))
            reading.update(other, rows, None, start)

    def _give_up(self, key: tuple[str, int], reason: str, otherwise: Callable[[], Tensor]) -> Tensor:
        self.layers[key].give_up(reason)
        self._batch.pop(key, None)
        return otherwise()


def _numbers(tensors: list[Tensor]) -> list[float]:
    """Their values, with one wait for the device where they share it."""
    if len({x.device for x in tensors}) == 1:
        return torch.stack(tensors).tolist()
    return [x.item() for x in tensors]


def _unfaithful(apart: float, limit: float) -> str | None:
    """Why a relative difference is too large, None if it is not."""
    if apart != apart:
        return "its output is not finite"
    if apart > limit:
        return f"the output rebuilt from the weights differs by {apart:.2g} from the model's own (limit {limit:g})"
    return None


def predicted_variance(call: Call, rows: Tensor | None, scale: float | Tensor) -> Tensor:
    """scale²·E‖q‖²·E‖k − k̄‖²/d per head: the variance of the logits if no query knew of any key's direction."""
    every_q, every_k = (max(1, x.shape[2] // PREDICTED) for x in (call.q, call.k))
    seen = rows[:, ::every_k] if rows is not None and rows.shape[1] == call.k.shape[2] else None
    rows = None if rows is None else rows[:, ::every_q]
    q, k = call.q.detach()[:, :, ::every_q].float(), call.k.detach()[:, :, ::every_k].float()
    norm = q.square().sum(-1)  # [B, H, M]
    if rows is None:
        q_norm = norm.mean((0, 2))
    else:
        q_norm = norm.masked_fill(~rows[:, None], 0.0).sum((0, 2)) / rows.sum().clamp_min(1)
    if seen is not None:
        weight = seen[:, None, :, None].float()
        count = weight.sum(2, keepdim=True).clamp_min(1)
        k = k - (k * weight).sum(2, keepdim=True) / count
        k_norm = ((k * weight).square().sum((2, 3)) / count[..., 0, 0]).mean(0)
    else:
        k_norm = (k - k.mean(2, keepdim=True)).square().sum(-1).mean((0, 2))
    k_norm = k_norm.repeat_interleave(q_norm.shape[0] // k_norm.shape[0])
    return scale**2 * q_norm * k_norm / q.shape[-1]
