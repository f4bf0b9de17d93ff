"""Which ranks hold the same heads, other heads of the same layers, or other layers: read from the model, or asked for.

| what is known | same heads | other heads | other layers |
| --- | --- | --- | --- |
| group, tensor_group, pipeline_group | as given | as given | as given |
| `group` is a DeviceMesh with named dimensions | the other dimensions | "tp", "tensor" | "pp", "pipeline" |
| parameters are DTensors | the other dimensions of their mesh | a dimension that shards heads | – |
| DistributedDataParallel, or weights that are equal on all ranks | its ranks | – | – |
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from regard._core.dtensor import is_dtensor
from regard.nn.projections import SEPARATE, STACKED

PROJECTIONS = {*itertools.chain(*SEPARATE), *STACKED, "in_proj_weight", "q_proj_weight", "k_proj_weight"}
TENSOR, PIPELINE = ("tp", "tensor", "tensor_parallel"), ("pp", "pipe", "pipeline", "pipeline_parallel")
MEET = timedelta(seconds=60)  # how long a rank waits for the others to make theirs
_NUMBERS: dict[str, int] = {}  # ranks -> how many QKClips were made over them


@dataclass
class Groups:
    """Process groups of this rank: `same`, one after another, hold the same heads; None is no such group."""

    same: tuple[Any, ...] = ()
    tensor: Any = None
    pipeline: Any = None

    def agree(self, is_wanted: bool) -> bool:
        """Returns whether any rank that holds other heads or layers wants something; all of them have to call it."""
        for group in (self.tensor, self.pipeline):
            if group is not None:
                is_wanted = "yes" in meet(dist.get_process_group_ranks(group), "yes" if is_wanted else "no")
        return is_wanted


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_groups(model: nn.Module, group: Any, tensor_group: Any, pipeline_group: Any) -> Groups:
    """Returns the groups of QKClip, once all of their ranks have made one; raises where they cannot be known."""
    if not (dist.is_available() and dist.is_initialized()):
        return Groups()
    found = _find_groups(model, group, tensor_group, pipeline_group)
    for one in found.same:
        meet(dist.get_process_group_ranks(one))
    return found


def _find_groups(model: nn.Module, group: Any, tensor_group: Any, pipeline_group: Any) -> Groups:
    if hasattr(group, "mesh_dim_names"):
        return _of_mesh(group, "QKClip")
    if group is not None:
        return Groups((group,), tensor_group, pipeline_group)
    if not is_distributed():
        return Groups((None,), tensor_group, pipeline_group)
    if tensor_group is not None or pipeline_group is not None:
        others = [dist.get_world_size(one) for one in (tensor_group, pipeline_group) if one is not None]
        if _product(others) < dist.get_world_size():
            raise ValueError(
                "QKClip: pass group= too: the ranks that hold the same heads of the same layers as this one"
            )
        return Groups((), tensor_group, pipeline_group)
    if (mesh := mesh_of(model)) is not None:
        return _of_mesh(mesh, "QKClip", tensor=None if _is_fully_sharded(model) else 0)
    if (known := getattr(model, "process_group", None)) is not None:  # DistributedDataParallel
        return Groups((known,))
    mine = sketch_weights(model)
    why = explain_difference(mine, meet(list(range(dist.get_world_size())), mine))
    if why is None:
        return Groups((None,))
    raise ValueError(
        f"QKClip: {why}. Which ranks hold the same heads cannot be known: pass group= (ranks with equal weights; a "
        "DeviceMesh with named dimensions will do), and tensor_group= or pipeline_group= where heads or layers are "
        "spread over ranks"
    )


def mesh_of(model: nn.Module) -> Any:
    """Returns the largest mesh of the model's DTensors, None if it has none."""
    meshes: list[Any] = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    meshes = [mesh for mesh in meshes if mesh is not None]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def _is_fully_sharded(model: nn.Module) -> bool:
    return any(hasattr(one, "_get_fsdp_state") or hasattr(one, "unshard") for one in model.modules())


def _of_mesh(mesh: Any, who: str, tensor: int | None = None) -> Groups:
    """Splits the dimensions of a mesh by their names; one without is `tensor`, or else ranks of the same heads."""
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim > 1:
            raise ValueError(f"{who}: the dimensions of the DeviceMesh have no names: pass group= and tensor_group=")
        found = mesh.get_group()
        return Groups((found,)) if tensor is None else Groups((), found)
    groups = {name: mesh.get_group(name) for name in names}
    same = tuple(group for name, group in groups.items() if name not in (*TENSOR, *PIPELINE))
    by = {kind: next((groups[name] for name in names if name in kind), None) for kind in (TENSOR, PIPELINE)}
    return Groups(same, by[TENSOR], by[PIPELINE])


def _product(numbers: list[int]) -> int:
    found = 1
    for number in numbers:
        found *= number
    return found


def sketch_weights(model: nn.Module) -> str:
    """Returns the names and shapes of the weights of queries and keys, and a sum of each, to compare ranks by.

    Of all weights where no name is known. Those that a wrapper shards (FSDP, ZeRO) are held by name alone.
    """
    named = dict(model.named_parameters())
    attention = {name: x for name, x in named.items() if set(name.split(".")[-2:]) & PROJECTIONS}
    parts = []
    for name, x in (attention or named).items():
        is_sharded = is_dtensor(x) or hasattr(x, "ds_id") or "_flat_param" in name
        if is_sharded or x.is_meta or isinstance(x, nn.UninitializedParameter):
            parts.append(f"{name} - -")
        else:
            flat = x.detach().reshape(-1)
            total = flat[:: max(1, len(flat) // 4096)].double().sum().item()
            parts.append(f"{name} {'x'.join(map(str, x.shape))} {total!r}")
    return "\n".join(parts)


def meet(ranks: list[int], mine: str = "") -> list[str]:
    """Returns what each of the ranks says; raises RuntimeError where one of them has not made a QKClip in time."""
    number = _NUMBERS[str(ranks)] = _NUMBERS.get(str(ranks), 0) + 1
    key = f"regard/qkclip/{hashlib.md5(str(ranks).encode()).hexdigest()}/{number}"
    store, keys = dist.distributed_c10d._get_default_store(), [f"{key}/{rank}" for rank in ranks]
    store.set(f"{key}/{dist.get_rank()}", mine)
    try:
        store.wait(keys, MEET)
    except (RuntimeError, dist.DistStoreError):
        missing = [rank for rank, one in zip(ranks, keys, strict=True) if not store.check([one])]
        _NUMBERS[str(ranks)] -= 1
        raise RuntimeError(
            f"QKClip was not made on ranks {', '.join(map(str, missing[:8]))} within {MEET.total_seconds():g} s; make "
            "it on every rank"
        ) from None
    return [store.get(one).decode() for one in keys]


def explain_difference(mine: str, sketches: list[str]) -> str | None:
    """Returns how this rank's weights differ from those of the first rank that has others, None if none has."""
    other = next((rank for rank, sketch in enumerate(sketches) if sketch != mine), None)
    if other is None:
        return None
    pairs = zip(mine.splitlines(), sketches[other].splitlines(), strict=False)
    shapes = [one.rsplit(" ", 1)[0] for one in mine.splitlines()] != [
        one.rsplit(" ", 1)[0] for one in sketches[other].splitlines()
    ]
    name = next((one.split(" ")[0] for one, theirs in pairs if one != theirs), "")
    what = "other layers or shapes" if shapes else "other values"
    return f"rank {other} holds {what} than this rank ({name or 'its number of weights'} differs)"


def find_given_groups(model: nn.Module, group: Any, tensor_group: Any, pipeline_group: Any) -> tuple[Groups, bool]:
    """Returns the groups as far as they were given or the model's DTensors tell, and whether that is all of them."""
    if not is_distributed():
        return Groups((), tensor_group, pipeline_group), True
    if hasattr(group, "mesh_dim_names"):
        return _of_mesh(group, "Monitor"), True
    if tensor_group is not None or pipeline_group is not None or group is not None:
        return Groups((), tensor_group, pipeline_group), True
    if (mesh := mesh_of(model)) is not None and (mesh.mesh_dim_names or mesh.ndim == 1):
        return _of_mesh(mesh, "Monitor", tensor=None if _is_fully_sharded(model) else 0), True
    return Groups(), hasattr(model, "process_group")
