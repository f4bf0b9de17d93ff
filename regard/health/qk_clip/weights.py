"""Selects the tensors that a layer's factors shrink: each once, and none that is frozen or serves something else."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from regard.nn.projections import NotFound, Projection

Holders = dict[int, list[tuple[int, int]]]


def select_projections(query: Projection, key: Projection) -> list[Projection]:
    """Returns the projections that share a layer's factor: both, or the one that may change for one head alone."""
    free = [one for one in (query, key) if not _is_frozen(one)]
    if query.heads != key.heads or not key.makes_all:  # a key head serves several queries, or one key has no weights
        free = [one for one in free if one is query]
    if not free:
        which = "query and key weights are" if _is_frozen(key) else "query weights are"
        raise NotFound(f"its {which} frozen (requires_grad is False): they stay as they are")
    return free


def _is_frozen(one: Projection) -> bool:
    return not all(_parameter_of(tensor).requires_grad for tensor in (one.weight, one.bias) if tensor is not None)


def tensors_to_shrink(shrunk: list[Projection], holders: Holders, module: nn.Module) -> list[Projection]:
    """Returns each tensor to shrink once; raises NotFound where a tensor serves something else as well."""
    found: dict[tuple, Projection] = {}
    uses: dict[int, int] = {}
    for one in shrunk:
        for tensor, dim in ((one.weight, one.dim), (one.bias, 0)):
            if tensor is not None:
                matrix = tensor.detach() if tensor.ndim == 2 else tensor.detach()[:, None]
                tied = (_address(_parameter_of(tensor)), tensor.storage_offset(), one.start, dim)
                uses[tied[0]] = uses.get(tied[0], 0) + (tied in found or tied[0] not in uses)
                found[tied] = replace(one, weight=matrix, bias=None, dim=dim)
    for address, count in uses.items():
        if sum(1 if owner == id(module) else slots for owner, slots in holders.get(address, [])) > count:
            raise NotFound("its query or key weights serve another layer too: they cannot shrink for this one alone")
    return list(found.values())


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
