"""Numbers beside a call's statistics: differences of outputs, predicted logit variance, spread of v, columns, gates."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard._call.scores import resolve_scale
from regard.health.capture.call import Call
from regard.health.measure.layer_reading import LayerReading, parts_of
from regard.health.measure.side_stream import copy_to_host
from regard.nn.projections import output_weight

if TYPE_CHECKING:
    from regard.health.measure.recorder import Layer


SAMPLED_ROWS = 64  # of a long call, on which the outputs are compared
SERIAL_ROWS = 4096  # up to so many rows of a head are compared by one program of the GPU
SAMPLED_KEYS = 1024  # rows and keys whose norms are taken, at least
NOTHING = 1e-6  # of the layer's largest output column: what counts as 0
# largest relative difference of one head's rebuilt output, as the square root of the sums of squares; in float64 models
# the softmax may be in float32
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
GPU_FLOAT32 = 5e-3  # products in TF32
NOT_FINITE = "its output is not finite"


def coarsest_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the dtype with the fewest digits that a call goes through, autocast's included."""
    dtypes = {x.dtype for x in tensors}
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        dtypes.add(torch.get_autocast_dtype(kind))
    return dtypes.pop() if len(dtypes) == 1 else max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the relative difference above which a layer is not measured."""
    return GPU_FLOAT32 if (dtype, device.type) == (torch.float32, "cuda") else TOLERANCE[dtype]


@lru_cache(maxsize=8)
def sampled_rows(length: int, device: torch.device) -> Tensor:
    """Returns the indices of 64 rows spread over a long call."""
    return torch.linspace(0, length - 1, SAMPLED_ROWS).round().long().to(device)


def relative_difference(own: Tensor, rebuilt: Tensor, rows: Tensor | None) -> Tensor:
    """Returns ‖own − rebuilt‖/‖own‖ per head [H], both [B, H, M, E], on the rows [B, M] that count."""
    own = own[: len(rebuilt)].detach()
    if own.is_cuda and 0 < own.shape[0] * own.shape[2] <= SERIAL_ROWS:
        from regard.health.measure import gpu_norms

        return gpu_norms.relative_difference(own, rebuilt, rows)
    own, rebuilt = own.float(), rebuilt.float()
    if rows is not None:
        hidden = ~rows[:, None, :, None]
        own, rebuilt = own.masked_fill(hidden, 0.0), rebuilt.masked_fill(hidden, 0.0)
    size = own.square().sum((0, 2, 3)).sqrt()
    difference = (own - rebuilt).square().sum((0, 2, 3)).sqrt()
    return difference / torch.where(size > 0, size, 1.0)


def explain_difference(difference: float, limit: float) -> str | None:
    """Returns why a relative difference is too large, None if it is not."""
    if difference != difference:
        return NOT_FINITE
    if difference > limit:
        return f"the output rebuilt from the weights differs by {difference:.2g} from the model's own (limit {limit:g})"
    return None


def add_predicted_variance(reading: LayerReading, call: Call, rows: Tensor | None) -> None:
    """Adds the logit variance that norms predict for one call, over the rows [B, M] that count, to a reading.

    scale²·E‖q/T‖²·E‖k − k̄‖²/d per head: the variance if queries and keys had independent directions. In self-attention
    the keys of rows that do not count are left out too.
    """
    scale, temperature = resolve_scale(call.options.get("scale"), call.q.shape[-1]), _temperature(call)
    if isinstance(temperature, numbers.Real):
        scale = scale / float(temperature)
    if not call.q.is_cuda or isinstance(scale, Tensor) or isinstance(temperature, Tensor):
        reading.add_prediction(predicted_variance(call, rows, scale), rows)
        return
    from regard.health.measure import gpu_norms

    parts = parts_of(reading.heads)
    gpu_norms.add_predicted_variance(
        reading.flat, parts["predicted"][0], parts["calls"][0], call.q.detach(), call.k.detach(), rows,
        strides_of(call), _are_rows_keys(call, rows), scale,
    )  # fmt: skip


def _temperature(call: Call) -> Any:
    """Returns a number or a tensor; a policy that measures the rows first is passed through."""
    given = call.options.get("temperature")
    return getattr(given, "value", given)


def strides_of(call: Call) -> tuple[int, int]:
    """Returns (every, every) so many of a call's rows and of its keys the norms are taken."""
    return max(1, call.q.shape[2] // SAMPLED_KEYS), max(1, call.k.shape[2] // SAMPLED_KEYS)


def _are_rows_keys(call: Call, rows: Tensor | None) -> bool:
    return rows is not None and rows.shape[1] == call.k.shape[2]


def predicted_variance(call: Call, rows: Tensor | None, scale: float | Tensor) -> Tensor:
    """Returns the predicted logit variance of one call per head, [H]."""
    every_q, every_k = strides_of(call)
    q, k = call.q.detach()[:, :, ::every_q].float(), call.k.detach()[:, :, ::every_k].float()
    norm = q.square().sum(-1)  # [B, H, M]
    temperature = _temperature(call)
    if isinstance(temperature, Tensor):
        per_row = temperature.detach().to(q).expand(*call.q.shape[:3], 1)
        norm = norm / per_row[:, :, ::every_q, 0].square()
    if rows is None:
        q_norm = norm.mean((0, 2))
    else:
        counted = rows[:, ::every_q]
        q_norm = norm.masked_fill(~counted[:, None], 0.0).sum((0, 2)) / counted.sum().clamp_min(1)
    if rows is not None and _are_rows_keys(call, rows):
        weight = rows[:, None, ::every_k, None].float()
        count = weight.sum(2, keepdim=True).clamp_min(1)
        k = k - (k * weight).sum(2, keepdim=True) / count
        k_norm = ((k * weight).square().sum((2, 3)) / count[..., 0, 0]).mean(0)
    else:
        k_norm = (k - k.mean(2, keepdim=True)).square().sum(-1).mean((0, 2))
    k_norm = k_norm.repeat_interleave(q_norm.shape[0] // k_norm.shape[0])
    return scale**2 * q_norm * k_norm / q.shape[-1]


def add_norms(flat: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Adds ‖q‖, ‖k‖ and ‖v‖, summed over the rows of each of L layers, to their readings `flat` [L, F].

    The B sequences of a layer follow one another in q [L·B, H, M, D], k and v.
    """
    layers, heads = len(flat), q.shape[1]
    sums = []  # [L, H] of each, in float32
    for x in (q, k, v):
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).float().unflatten(0, (layers, -1)).sum((1, 3))
        sums.append(norms.repeat_interleave(heads // norms.shape[1], 1) if norms.shape[1] != heads else norms)
    (begin, end, shape), (at, _, _) = (parts_of(heads)[name] for name in ("norms", "norm_rows"))
    flat[:, begin:end].view(layers, *shape).add_(torch.stack(sums, 1))
    for offset, x in enumerate((q, k)):
        flat[:, at + offset] += x.shape[0] // layers * x.shape[2]


def value_spread(v: Tensor, layers: int = 1) -> Tensor:
    """Returns how much the values [L·B, G, N, E] of L layers differ and how large they are, [2, L, G].

    spread = max (max_j v_j − min_j v_j) and size = max |v|, over sequences and channels; waits for no device.

    >>> from regard.health.measure.norms import value_spread
    >>> v = torch.tensor([[0.0, 5.0, 2.0], [1.0, 1.0, 1.0]])[None, :, :, None]  # two heads of three keys
    >>> value_spread(v)
    tensor([[[5., 0.]],
    <BLANKLINE>
            [[5., 1.]]])
    """
    v = v.detach()[:, :, :: max(1, v.shape[2] // SAMPLED_KEYS)]
    wide = torch.promote_types(v.dtype, torch.float32)
    low, high = v.amin(2).to(wide), v.amax(2).to(wide)  # on a CPU torch's aminmax takes 3 to 15 times as long
    both = torch.stack([high - low, torch.maximum(high, -low)])  # [2, L·B, G, E]
    return both.unflatten(1, (layers, -1)).amax((2, 4))


class OutputColumns:
    """Finds heads that nothing reads, because their columns of the output projection are 0."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._columns: dict[str, Tensor | None] = {}

    def compute(self, layers: Iterable[Layer]) -> None:
        """Starts the norms of the layers' columns without waiting; each projection is read once."""
        for layer in layers:
            if layer.reason is None and layer.name not in self._columns:
                self._columns[layer.name] = self._largest(layer)

    def find_unused_heads(self, layers: Sequence[Layer]) -> None:
        """Stores in each layer the heads whose columns are 0, with one wait for all of them.

        Modules that are called several times are left out: differential attention mixes the columns of two calls.
        """
        calls = Counter(layer.name for layer in layers)
        once = [layer for layer in layers if layer.reading is not None and calls[layer.name] == 1]
        self.compute(once)
        known = [(layer, columns) for layer in once if (columns := self._columns[layer.name]) is not None]
        host = [columns for _, columns in known]
        if any(columns.is_cuda for columns in host):
            host = copy_to_host(host)
        for (layer, _), columns in zip(known, host, strict=True):
            largest = columns.view(layer.heads, -1).amax(1)
            layer.unused_heads = (largest <= NOTHING * largest.amax()).nonzero().flatten().tolist()

    def _largest(self, layer: Layer) -> Tensor | None:
        """Returns the largest entry of each column, [H·E]; None if the projection is not found or has another width."""
        if layer.name not in self._modules:
            return None
        weight = output_weight(self._modules[layer.name], self._modules.get(layer.name.rpartition(".")[0]))
        if weight is None or weight.is_meta or weight.shape[1] != layer.heads * layer.value_dim:
            return None
        weight = weight.detach()
        plain = weight if type(weight) is Tensor else weight.dequantize()  # torchao's have few functions
        return torch.linalg.vector_norm(plain, torch.inf, dim=0)


NEAR_ZERO = 0.05  # a gate below it lets almost nothing through


def gates_of_heads(gates: Tensor, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Returns σ(g) as [B, H, M, 1 or E] of a call with outputs [B, H, M, E]; None if it does not fit.

    A model may hold it as its output is laid out: (B, M, H·E), (B, M, H), (B, M, H, …) or (B, H, M, …).

    >>> import torch
    >>> from regard.health.measure.norms import gates_of_heads
    >>> gates_of_heads(torch.zeros(2, 5, 12), (2, 3, 5, 4)).shape
    torch.Size([2, 3, 5, 4])
    """
    batch, heads, queries, width = shape
    if tuple(gates.shape) in ((batch, queries, heads), (batch, queries, heads * width)):
        gates = gates.unflatten(-1, (heads, -1))
    elif tuple(gates.shape) == (batch, heads, queries):
        return gates[..., None]
    if gates.ndim != 4 or gates.shape[-1] not in (1, width):
        return None
    if gates.shape[:3] == (batch, heads, queries):
        return gates
    return gates.transpose(1, 2) if gates.shape[:3] == (batch, queries, heads) else None


def gate_sums(gates: Tensor, rows: Tensor | None) -> Tensor:
    """Returns [3, H]: the number of gates [B, H, M, …] in the rows [B, M] that count, their sum, those near 0."""
    gates = gates.detach().double()
    counts = torch.ones_like(gates) if rows is None else rows[:, None, :, None].expand(gates.shape).double()
    return torch.stack([x.sum((0, 2, 3)) for x in (counts, counts * gates, counts * (gates < NEAR_ZERO))])
