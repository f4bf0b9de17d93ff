"""Attention on DTensors that are sharded over heads (or batch entries): each rank computes its own, nobody talks.

Heads do not know of one another, so that the local tensors are the whole problem of this rank. What is given per head
beside q, k and v, whole on every rank, is cut to the rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.statistics import Statistics


def is_dtensor(x) -> bool:
    return isinstance(x, Tensor) and type(x).__name__ == "DTensor"


def attention(function: Callable, q, k, v, options: dict):
    """function(q, k, v, **options) on each rank's heads; outputs and statistics are DTensors, sharded as q is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(x):
            raise TypeError(f"q, k and v must all be DTensors or none of them, got {type(x).__name__} for {name}")
        if x.device_mesh != q.device_mesh or tuple(x.placements) != tuple(q.placements):
            raise ValueError(f"q, k and v must be placed alike, got {q.placements} for q and {x.placements} for {name}")
    sharded = [placement.dim % q.ndim for placement in q.placements if isinstance(placement, Shard)]
    if not all(isinstance(p, (Shard, Replicate)) for p in q.placements) or any(dim >= q.ndim - 2 for dim in sharded):
        raise ValueError(
            f"q, k and v may be sharded over heads or batch entries, got {q.placements}; a sequence that is sharded "
            "goes to regard.parallel.attention, as local tensors"
        )
    mesh, placements = q.device_mesh, q.placements
    _check_even(q, k, v, Shard)
    shape, start = compute_local_shape_and_global_offset(q.shape, mesh, placements)

    def local(name: str, x):
        if is_dtensor(x):
            return x.to_local()
        if not isinstance(x, Tensor):
            return x
        dims = {"sink": [q.ndim - 3], "scale": [q.ndim - 3], "key_lengths": [0]}.get(name)
        if dims is None or x.ndim != 1:
            dims = list(range(q.ndim - x.ndim, q.ndim))
        for dim, whole in enumerate(dims):
            if whole in sharded and x.shape[dim] == q.shape[whole] != 1:
                x = x.narrow(dim, start[whole], shape[whole])
        return x

    given = {name: local(name, x) for name, x in options.items()}
    result = function(*(x.to_local() for x in (q, k, v)), **given)

    def placed(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, placements, run_check=False)

    if isinstance(result, tuple):
        out, stats = result
        return placed(out), Statistics({name: placed(x) for name, x in stats.items()})
    return placed(result)


def _check_even(q, k, v, shard: Any) -> None:
    """Every rank has as many heads (and batch entries) as any other, so that its queries meet their own keys."""
    for dim in range(q.ndim - 2):
        ranks = 1
        for axis, placement in enumerate(q.placements):
            if isinstance(placement, shard) and placement.dim % q.ndim == dim:
                ranks *= q.device_mesh.size(axis)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if ranks > 1 and (x.ndim != q.ndim or x.shape[dim] % ranks):
                raise ValueError(
                    f"dimension {dim} of {name} (shape {tuple(x.shape)}) does not divide over the {ranks} ranks that q "
                    "is sharded over"
                )
