"""Attention on DTensors that are sharded over heads (or batch entries): each rank computes its own, nobody talks.

Heads do not know of one another, so that the local tensors are the whole problem of this rank. What is given per head
beside q, k and v, whole on every rank, is cut to the rank's heads. k and v may be whole on every rank while q is
sharded over heads (where there are fewer key heads than ranks): each rank takes those that its queries belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._call.arguments import AttentionOptions
from regard._call.mask.mask import Mask
from regard._call.mask.parts import Intervals
from regard.bias import Bias
from regard.normalizers import Choice
from regard.statistics import Statistics


def is_dtensor(x) -> bool:
    return isinstance(x, Tensor) and type(x).__name__ == "DTensor"


def attention(function: Callable, q, k, v, options: AttentionOptions):
    """function(q, k, v, **options) on each rank's heads; outputs and statistics are DTensors, sharded as q is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(x):
            raise TypeError(f"q, k and v must all be DTensors or none of them, got {type(x).__name__} for {name}")
    sharded = [placement.dim % q.ndim for placement in q.placements if isinstance(placement, Shard)]
    if not all(isinstance(p, (Shard, Replicate)) for p in q.placements) or any(dim >= q.ndim - 2 for dim in sharded):
        raise ValueError(
            f"q, k and v may be sharded over heads or batch entries, got {q.placements}; a sequence that is sharded "
            "goes to regard.parallel.attention, as local tensors"
        )
    mesh, placements, heads = q.device_mesh, q.placements, q.ndim - 3
    whole_keys = _axes_with_whole_keys(q, k, v, Shard, Replicate)
    _check_even(q, k, v, whole_keys, Shard)
    shape, start = compute_local_shape_and_global_offset(q.shape, mesh, placements)

    def local(name: str, x):
        if isinstance(x, Choice) and isinstance(x.theta, Tensor):
            return Choice(x.normalizer, local("sink", x.theta))
        if is_dtensor(x):
            return x.to_local()
        if not isinstance(x, Tensor):
            return x
        dims = {"sink": [heads], "scale": [heads], "key_lengths": [0]}.get(name)
        if dims is None or x.ndim != 1:
            dims = list(range(0 if name == "gate" else q.ndim - x.ndim, q.ndim))[: x.ndim]
        for dim, whole in enumerate(dims):
            if whole in sharded and x.shape[dim] == q.shape[whole] != 1:
                x = x.narrow(dim, start[whole], shape[whole])
        return x

    _check_mask(options.attn_mask, sharded, heads)
    if options.score_mod is not None and heads in sharded:
        raise TypeError(
            "score_mod counts heads, which a DTensor sharded over heads does not have; pass softcap or a bias"
        )
    given = {name: local(name, x) for name, x in options._asdict().items()}
    keys = [_keys(x, whole_keys) for x in (k, v)]
    if whole_keys:
        own = start[heads], shape[heads], q.shape[heads]
        keys = [_of_queries(x, *own, options.enable_gqa) for x in keys]
    result = function(q.to_local(), *keys, **given)

    def placed(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, placements, run_check=False)

    if isinstance(result, tuple):
        out, stats = result
        return placed(out), Statistics({name: placed(x) for name, x in stats.items()})
    return placed(result)


def _check_mask(attn_mask: Any, sharded: list[int], heads: int) -> None:
    """Raise for a `regard.Mask` or bias that would have to be cut to the rank's heads or batch entries."""
    for x in attn_mask if isinstance(attn_mask, (tuple, list)) else (attn_mask,):
        by_head = isinstance(x, Bias) or (isinstance(x, Mask) and any(isinstance(p, Intervals) for p in x.parts))
        by_head = by_head or (isinstance(x, Tensor) and x is not attn_mask)  # one of a pair
        by_entry = isinstance(x, Mask) and not x.is_shared and any(dim != heads for dim in sharded)
        if (by_head and sharded) or by_entry:
            kind = type(x).__name__
            raise TypeError(f"attn_mask: a {kind} is not cut to a rank's DTensor; pass all as one dense tensor")


def _axes_with_whole_keys(q, k, v, shard: Any, replicate: Any) -> list[int]:
    """The mesh axes over which q is sharded by heads while k and v are whole; on the others all are placed alike."""
    found = []
    for name, x in (("k", k), ("v", v)):
        if x.device_mesh != q.device_mesh:
            raise ValueError(
                f"q, k and v must be on one mesh, got {q.device_mesh} for q and {x.device_mesh} for {name}"
            )
        over = []
        for axis, (own, other) in enumerate(zip(q.placements, x.placements, strict=True)):
            by_heads = isinstance(own, shard) and own.dim % q.ndim == q.ndim - 3
            if by_heads and isinstance(other, replicate):
                over.append(axis)
            elif own != other:
                raise ValueError(
                    f"q, k and v must be placed alike (or k and v replicated where q is sharded over heads), got "
                    f"{q.placements} for q and {x.placements} for {name}"
                )
        found.append(over)
    if found[0] != found[1]:
        raise ValueError(f"k and v must be placed alike, got {k.placements} and {v.placements}")
    by_heads = [p for p in k.placements if isinstance(p, shard) and p.dim % k.ndim == k.ndim - 3]
    if found[0] and (by_heads or not q.ndim == k.ndim == v.ndim):
        raise ValueError(f"k and v must be whole on every axis that shards the heads of q, got {k.placements}")
    return found[0]


def _keys(x, whole: list[int]) -> Tensor:
    """The local keys, or values; where they are whole on every rank, their gradient is the sum over ranks."""
    from torch.distributed.tensor import Partial

    placed = [Partial() if axis in whole else placement for axis, placement in enumerate(x.placements)]
    return x.to_local(grad_placements=placed) if whole else x.to_local()


def _of_queries(x: Tensor, first: int, count: int, heads: int, grouped: bool) -> Tensor:
    """Of whole keys [.., G, N, D] the heads that the queries first … first + count − 1 of `heads` attend to."""
    own = x.shape[-3]
    if own == 1:
        return x
    if own == 0 or heads % own or not (grouped or own == heads):
        hint = "; pass enable_gqa=True for grouped queries" if own and heads % own == 0 else ""
        raise ValueError(f"q has {heads} heads and k and v have {own}: they do not fit{hint}")
    group = heads // own
    if count % group == 0 and first % group == 0:
        return x.narrow(-3, first // group, count // group)
    if first // group == (first + count - 1) // group:
        return x.narrow(-3, first // group, 1)
    return x.index_select(-3, torch.arange(first, first + count, device=x.device) // group)


def _check_even(q, k, v, whole_keys: list[int], shard: Any) -> None:
    """Every rank has as many heads (and batch entries) as any other, so that its queries meet their own keys."""
    for dim in range(q.ndim - 2):
        axes = [axis for axis, p in enumerate(q.placements) if isinstance(p, shard) and p.dim % q.ndim == dim]
        for name, x in (("q", q), ("k", k), ("v", v)):
            ranks = 1
            for axis in axes:
                ranks *= 1 if name != "q" and axis in whole_keys else q.device_mesh.size(axis)
            if ranks > 1 and (x.ndim != q.ndim or x.shape[dim] % ranks):
                raise ValueError(
                    f"dimension {dim} of {name} (shape {tuple(x.shape)}) does not divide over the {ranks} ranks that "
                    "it is sharded over; k and v may be replicated instead"
                )
