"""One application of QK-clip: from the observed largest logits to the weights, each shrunk once, and what it did."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._core.dtensor import is_dtensor
from regard.health.capture.forwards import as_written
from regard.health.capture.interception import check_model
from regard.health.qk_clip.max_logits import MaxLogits, weights_version
from regard.health.watching.groups import TENSOR, Groups
from regard.health.watching.sample import series_names
from regard.nn.projections import NotFound, Projection, bounded_scores_reason, projections

Holders = dict[int, list[tuple[int, int]]]
Masters = Callable[[Tensor], Tensor | None]  # parameter -> its float32 copy in the optimizer, None if it has none


class Frozen(NotFound):
    """The weights stay as they are because requires_grad is False."""


class Clip(NamedTuple):
    """One head that was clipped: its largest logit, and the factor that brought it to the threshold."""

    layer: str
    head: int
    max_logit: float
    factor: float


class Clipped:
    """What a call of `qk_clip` did, read from the device only on request.

    `heads`: the heads that were clipped, or would be with `log_only`; `max_logit`: layer → the largest logit of each
    head; `skipped`: layer → why its weights are not clipped; `applied`: False with `log_only`.
    """

    def __init__(self, applied: bool = True) -> None:
        self.applied = applied
        self.skipped: dict[str, str] = {}
        self.unclipped: set[str] = set()  # layers of `skipped` that should be clipped where their logits pass τ
        self.knows_a_layer = False  # its linear layers of queries and keys were found, or its scores are bounded
        self._found: dict[str, tuple[Tensor, Tensor | None]] = {}  # layer -> largest logits, factors

    @property
    def max_logit(self) -> dict[str, list[float]]:
        return {name: largest.tolist() for name, (largest, _) in self._found.items()}

    @property
    def heads(self) -> list[Clip]:
        found = []
        for name, (largest, factors) in self._found.items():
            for head, factor in enumerate([] if factors is None else factors.tolist()):
                if factor < 1.0:
                    found.append(Clip(name, head, largest[head].item(), factor))
        return found

    def scalars(self, groups: Groups) -> dict[str, float]:
        """Returns the largest logit over the model and per layer, and the number of clipped heads, by series name.

        Over all ranks of `groups`, whose other heads and layers are joined here: each of them has to call it.
        """
        clipped, tops = len(self.heads), {name: max(heads, default=-math.inf) for name, heads in self.max_logit.items()}
        for group in (groups.tensor, groups.pipeline):
            if group is None:
                continue
            gathered: list = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, (clipped, tops), group=group)
            clipped, tops = sum(one for one, _ in gathered), {}
            for stage, (_, more) in enumerate(gathered):
                for name, top in more.items():
                    is_other = group is groups.pipeline and sum(name in each for _, each in gathered) > 1
                    label = f"stage{stage}.{name}" if is_other else name
                    tops[label] = max(top, tops.get(label, -math.inf))
        names = series_names(list(tops))
        found = {f"attention/{names[name]}/max_logit": top for name, top in tops.items()}
        top = max(tops.values(), default=math.nan)
        return found | {"attention/max_logit": top, "attention/clipped_heads": clipped}

    def __repr__(self) -> str:
        if not self._found and not self.skipped:
            return "Clipped(nothing: no logits are known yet; they are observed from now on, for the next call)"
        return f"Clipped(heads={self.heads}, max_logit={self.max_logit}, skipped={self.skipped})"


def check_arguments(model: Any, threshold: Any) -> None:
    """Raises TypeError or ValueError for what `qk_clip` and `QKClip` cannot work with."""
    check_model(model)
    is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not (is_number and 0 < threshold < math.inf):
        raise ValueError(f"threshold must be a positive, finite number, got {threshold!r}")


def clip_observed(
    model: nn.Module, observer: MaxLogits, threshold: float, groups: Groups, *, names: tuple[str, str] | None = None,
    masters: Masters | None = None, log_only: bool = False, growth: Callable[[str, Tensor], Tensor] | None = None,
) -> Clipped:  # fmt: skip
    """Shrinks the weights of every head whose largest logit since the last call passed the threshold.

    masters: finds the float32 copy that an optimizer keeps of a parameter, to be shrunk with it.
    growth: layer, largest logits → what the logits are expected to be after the step.
    """
    modules, holders = dict(as_written(model).named_modules()), holders_of(model)
    result = Clipped(applied=not log_only)
    seen = observer.take(model, groups.same)
    seen = {name: seen[name] for name in modules if name in seen}  # one that was removed from the model is left out
    wanted = _find_factors({name: x if growth is None else growth(name, x) for name, x in seen.items()}, threshold)
    for name, largest in seen.items():
        factors = None
        try:
            owner, query, key, tensor_group = find_projections(modules, name, observer.shapes[name], names, groups)
            result.knows_a_layer = True
            tensors = tensors_to_shrink(select_projections(query, key), holders, owner, masters)
        except NotFound as reason:
            result.skipped[name] = str(reason)
            is_bounded = bounded_scores_reason(modules[name]) is not None
            result.knows_a_layer |= is_bounded
            if not (is_bounded or isinstance(reason, Frozen)):
                result.unclipped.add(name)
        else:
            factors = wanted[name]
            whole = factors if tensor_group is None else _join_heads(factors, tensor_group)
            for tensor in () if log_only else tensors:
                tensor.shrink(whole)
        result._found[name] = largest, factors
    result.skipped |= observer.unseen
    observer.unseen.clear()
    for name in (modules.keys() & set(observer.regard_modules)) - result._found.keys():
        if (why := bounded_scores_reason(modules[name])) is not None:
            result.skipped[name], result.knows_a_layer = why, True
    observer.version, observer.is_clipped = weights_version(model), not log_only
    return result


def _find_factors(expected: dict[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Returns layer → τ/m of each head whose largest logit m is finite and passes τ, 1 of others; few operations."""
    found: dict[str, Tensor] = {}
    for device in {x.device for x in expected.values()}:
        own = {name: x for name, x in expected.items() if x.device == device}
        joined = torch.cat(list(own.values()))
        factors = torch.where(joined.isfinite() & (joined > threshold), threshold / joined, 1.0)
        found |= zip(own, factors.split([len(x) for x in own.values()]), strict=True)
    return found


def find_projections(
    modules: dict[str, nn.Module], name: str, shape: tuple[int, int], names: tuple[str, str] | None, groups: Groups
) -> tuple[nn.Module, Projection, Projection, Any]:
    """Returns the module that holds the query and key layers, both, and the group over which its heads are sharded.

    The module that computes scores may hold none (torchtitan's, Megatron's core attention); the one around it does.
    """
    heads, width = shape
    path = name
    while True:
        try:
            return modules[path], *projections(modules[path], heads, width, names), None
        except NotFound as reason:
            for ranks, group in _shards_of(modules[path], groups):
                try:  # the weights are those of all ranks, the heads seen those of this one
                    return modules[path], *projections(modules[path], ranks * heads, width, names), group
                except NotFound:
                    continue
            if not path or "no linear layers" not in str(reason):
                raise
            first = reason
        path = path.rpartition(".")[0]
        if path not in modules or isinstance(modules[path], (nn.ModuleList, nn.Sequential)):
            raise first


def _shards_of(module: nn.Module, groups: Groups) -> Iterator[tuple[int, Any]]:
    """Yields (ranks, group) of the mesh dimensions over which heads may be sharded, the likeliest first."""
    meshes: list[Any] = [getattr(x, "device_mesh", None) for x in module.parameters() if is_dtensor(x)]
    if not meshes:
        return
    mesh = max(meshes, key=lambda one: one.ndim)
    if groups.tensor is not None:
        yield dist.get_world_size(groups.tensor), groups.tensor
    order = sorted(range(mesh.ndim), key=lambda at: (mesh.mesh_dim_names or ("",) * mesh.ndim)[at] in TENSOR)
    for at in reversed(order):
        yield mesh.size(at), mesh.get_group(at)


def _join_heads(factors: Tensor, group: Any) -> Tensor:
    """Returns the factors of all heads, in the order of the ranks that hold them."""
    world = dist.get_world_size(group)
    joined = [torch.empty_like(factors) for _ in range(world)]
    dist.all_gather(joined, factors.contiguous(), group=group)
    return torch.cat(joined)


def select_projections(query: Projection, key: Projection) -> list[Projection]:
    """Returns the projections that share a layer's factor, each with the power that it takes.

    | which | query | key |
    | --- | --- | --- |
    | a key head of its own for each query head | 1/2 | 1/2 |
    | a key head serves several query heads (GQA, MQA), one key is learned, or the key weights are frozen | 1 | – |
    | the query weights are frozen, and each query head has its key head | – | 1 |
    | MLA: rows without position | 1/2 | 1/2 |
    | MLA: rotary rows (their key is one for all heads), rows of values | 1 | 0 |
    """
    query_is_frozen, key_is_frozen = _is_frozen(query), _is_frozen(key)
    key_is_shared = query.heads != key.heads or not key.makes_all
    if query_is_frozen and (key_is_frozen or key_is_shared or query.fixed):
        which = "query and key weights are" if key_is_frozen else "query weights are"
        raise Frozen(f"its {which} frozen (requires_grad is False): they stay as they are")
    if query_is_frozen:
        return [key]
    if key_is_frozen or key_is_shared:
        return [query]
    return [_with_powers(query, 1.0), _with_powers(key, 0.0)]


def _with_powers(one: Projection, fixed: float) -> Projection:
    """Returns a projection of which each head takes half of the factor, its last rows the power `fixed`."""
    rows = one.width // one.heads - one.fixed
    return replace(one, powers=((rows, 0.5), (one.fixed, fixed)))


def _is_frozen(one: Projection) -> bool:
    return not all(_parameter_of(tensor).requires_grad for tensor in (one.weight, one.bias) if tensor is not None)


def tensors_to_shrink(
    shrunk: list[Projection], holders: Holders, module: nn.Module, masters: Masters | None = None
) -> list[Projection]:
    """Returns each tensor to shrink once, master copies included; raises NotFound where one serves something else."""
    found: dict[tuple, Projection] = {}
    copies: dict[tuple, Projection] = {}
    uses: dict[int, int] = {}
    for one in shrunk:
        for tensor, dim in ((one.weight, one.dim), (one.bias, 0)):
            if tensor is not None:
                tied = (_address(_parameter_of(tensor)), tensor.storage_offset(), one.start, dim)
                uses[tied[0]] = uses.get(tied[0], 0) + (tied in found or tied[0] not in uses)
                found[tied] = replace(one, weight=_as_matrix(tensor), bias=None, dim=dim)
                if masters is not None and (master := _master_of(tensor, masters)) is not None:
                    copies[tied] = replace(found[tied], weight=_as_matrix(master))
    for address, count in uses.items():
        if sum(1 if owner == id(module) else slots for owner, slots in holders.get(address, [])) > count:
            raise NotFound("its query or key weights serve another layer too: they cannot shrink for this one alone")
    return [*found.values(), *copies.values()]


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.ndim == 2 else tensor.detach()[:, None]


def _master_of(tensor: Tensor, masters: Masters) -> Tensor | None:
    """Returns the master copy of a projection's tensor, which may be a part of a stacked parameter."""
    parameter = _parameter_of(tensor)
    master = masters(parameter)
    if master is None or master.shape == tensor.shape:
        return master
    if master.shape != parameter.shape:
        raise NotFound(
            f"the master copy of its weights has shape {tuple(master.shape)}, the weights {tuple(parameter.shape)}; "
            "pass masters= a function that returns a tensor of the same shape"
        )
    return master.narrow(0, tensor.storage_offset() - parameter.storage_offset(), tensor.shape[0])


def holders_of(model: nn.Module) -> Holders:
    """Returns parameter → the modules that hold it, each with the number of names under which that is held."""
    slots: dict[int, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            slots[id(child)] = slots.get(id(child), 0) + 1
    found: Holders = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(_address(parameter), []).append((id(module), max(slots.get(id(module), 1), 1)))
    return found


def _address(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors that share their memory."""
    return (tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0) or id(tensor)


def _parameter_of(tensor: Tensor) -> Tensor:
    """Returns the parameter of which a projection's tensor is a part."""
    return tensor if tensor._base is None else tensor._base
