"""Measures plain self-attention after the forward, the layers of one shape together.

While a forward is being enqueued, each millisecond on the host may be one in which the GPU has nothing to do. So a call
that only wants softmax, a scale and causal order is copied there, a few sequences of it, and measured when the model
has got all of its work: twelve layers of one shape take as many launches as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._call.scores import resolve_scale
from regard.health.capture.call import Call
from regard.health.measure import norms
from regard.health.measure.layer_reading import LayerReading, empty_sums, parts_of
from regard.health.measure.recorder import BatchReading
from regard.statistics import NAMES, stack

MOST_BYTES = 2**28  # of copies; beyond, calls are measured while the forward still runs

Key = tuple[str, int]  # of a layer: name, use
Measure = Callable[[Call], tuple[Tensor, Mapping[str, Tensor]]]  # call -> output, statistics


def is_plain(call: Call) -> bool:
    """True for softmax of equal batches without a mask, the scale a number or None; causal order and dropout aside."""
    if call.mask is not None or call.parts or not call.q.shape[0] == call.k.shape[0] == call.v.shape[0]:
        return False
    others = (value for name, value in call.options.items() if name not in ("scale", "normalizer"))
    has_number = isinstance(call.options.get("scale"), (int, float, type(None)))
    return has_number and call.options.get("normalizer") in (None, "softmax") and all(x is None for x in others)


def can_wait(call: Call, name: str) -> bool:
    """True for self-attention without a mask whose inputs tell all that its measurement needs."""
    q, k, v = call.q, call.k, call.v
    if call.obstacle is not None or call.dropout or not is_plain(call) or call.is_cross(name):
        return False
    if not (q.shape[2] == k.shape[2] and q.numel() and v.numel() and q.shape[1] % k.shape[1] == 0):
        return False
    if not (q.dtype == k.dtype == v.dtype and type(q) is type(k) is type(v) is Tensor):
        return False
    kind = q.device.type
    return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == q.dtype


def _run_nothing(rows: Tensor | None) -> Tensor:
    raise RuntimeError("a postponed call does not keep the model's own function, which would keep its whole batch")


def copy_first(call: Call, sequences: int) -> Call:
    """Returns a call on copies of its first sequences, without the model's own function."""
    with torch.no_grad():
        q, k, v = (x[:sequences].clone() for x in (call.q, call.k, call.v))
    return call.changed(q=q, k=k, v=v, own=_run_nothing)


@dataclass
class PostponedCall:
    """A call on copies of its first sequences (see `copy_first`), and a copy of the model's own output of them."""

    key: Key
    call: Call
    own: Tensor  # [B, H, M, E]
    copied: torch.cuda.Event | None  # when the model's stream has got as far
    limit: float  # of the relative difference

    @property
    def kind(self) -> tuple:
        """What calls that are measured together have in common."""
        call = self.call
        shapes = call.q.shape, call.k.shape, call.v.shape, self.own.shape
        return call.q.device, call.q.dtype, self.own.dtype, *shapes, call.causal, call.options.get("scale")

    @property
    def bytes(self) -> int:
        return self.call.q.nbytes + self.call.k.nbytes + self.call.v.nbytes + self.own.nbytes


def measure_together(calls: Sequence[PostponedCall], measure: Measure) -> list[BatchReading]:
    """Measures calls of one kind as the sequences of one batch; returns the reading of each."""
    first, layers = calls[0].call, len(calls)
    heads, device = first.q.shape[1], first.q.device
    q, k, v = (torch.cat([getattr(one.call, name) for one in calls]) for name in ("q", "k", "v"))
    whole, own = first.changed(q=q, k=k, v=v), torch.cat([one.own for one in calls])
    with torch.autocast(device.type, enabled=False):  # all of it is in autocast's dtype already
        rebuilt, stats = measure(whole)
    flat = empty_sums(heads, device).repeat(layers, 1)  # [L, F], as in `LayerReading`
    histogram = torch.zeros((layers, *LayerReading.histogram_shape(heads)), dtype=torch.int64, device=device)
    norms.add_norms(flat, q, k, v)
    add = _add_on_gpu if device.type == "cuda" else _add_layer_by_layer
    differences, values = add(flat, histogram, whole, own, rebuilt, stats), norms.value_spread(v, layers)
    return [
        BatchReading(
            LayerReading.from_sums(heads, flat[at], histogram[at]), one.limit, differences[at], values=values[:, at]
        )
        for at, one in enumerate(calls)
    ]


def _add_on_gpu(
    flat: Tensor, histogram: Tensor, call: Call, own: Tensor, rebuilt: Tensor, stats: Mapping[str, Tensor]
) -> Tensor:
    """Adds what was measured to the readings of all layers; returns the relative differences, [L, H]."""
    from regard.health.measure import gpu_norms, gpu_reading

    layers, heads = len(flat), call.q.shape[1]
    gpu_reading.update_layers(flat, histogram, stack(stats), None, 0)
    parts, scale = parts_of(heads), float(resolve_scale(call.options.get("scale"), call.q.shape[-1]))
    gpu_norms.add_predicted_variance(
        flat, parts["predicted"][0], parts["calls"][0], call.q, call.k, None, norms.strides_of(call), False, scale
    )
    return gpu_norms.relative_difference(own, rebuilt, None, layers).view(layers, heads)


def _add_layer_by_layer(
    flat: Tensor, histogram: Tensor, call: Call, own: Tensor, rebuilt: Tensor, stats: Mapping[str, Tensor]
) -> Tensor:
    differences = []
    sequences = len(own) // len(flat)
    for at, sums in enumerate(zip(flat, histogram, strict=True)):
        part = slice(at * sequences, (at + 1) * sequences)
        reading = LayerReading.from_sums(call.q.shape[1], *sums).update({name: stats[name][part] for name in NAMES})
        norms.add_predicted_variance(reading, call.changed(q=call.q[part], k=call.k[part], v=call.v[part]), None)
        differences.append(norms.relative_difference(own[part], rebuilt[part], None))
    return torch.stack(differences)
