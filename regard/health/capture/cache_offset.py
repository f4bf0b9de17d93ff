"""Where the queries of a cached call stand: behind the keys of earlier steps, so that distance counts from there.

`regard.attention` counts query i at position i, as torch's causal mask does. With a cache the first query of a call
stands at `start`, and its distance is Σ p̄_j·|start + i − j|; as it sees no key behind itself, start + i − Σ p̄_j·j.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import regard
from regard.health.capture.call import Call, named_cross


class Standing:
    """The position of a call's first query; layers share their masks, so what was found is kept for a forward."""

    def __init__(self) -> None:
        self._masks: list[tuple[Tensor, int]] = []

    def forget(self) -> None:
        self._masks.clear()

    def start(self, call: Call, name: str) -> int:
        """0 without a cache, and under torch's own causal order.

        A static cache is longer than what is in it: there the mask tells the last key in use.
        """
        queries, keys = call.q.shape[2], call.k.shape[2]
        if call.causal or _is_cross(call, name) or queries >= keys or not getattr(call.module, "is_causal", False):
            return 0
        mask = call.mask
        if mask is None or mask.ndim < 2 or mask.shape[-2] != queries:
            return keys - queries
        for known, found in self._masks:
            if known is mask:
                return found
        first = mask[..., 0, :]
        seen = (first if first.dtype == torch.bool else first != -math.inf).reshape(-1, keys).any(0).nonzero()
        found = int(seen[-1]) if len(seen) else keys - queries
        self._masks.append((mask, found))
        return found

    def in_the_corner(self, call: Call, name: str) -> bool:
        """Does torch's causal order, which begins at the first key, hide keys behind the queries that are in use?"""
        queries, keys = call.q.shape[2], call.k.shape[2]
        if not call.causal or not 0 < queries < keys or _is_cross(call, name):
            return False
        return bool(call.k[:, :, queries:].any())  # those of a static cache that is empty behind are 0


def _is_cross(call: Call, name: str) -> bool:
    return named_cross(name) if call.cross is None else call.cross


def distance(call: Call, stats: dict[str, Tensor], start: int, backend: str | None) -> Tensor:
    """[B, H, M]: the statistic as counted from where the queries stand."""
    if start == 0:
        return stats["distance"]
    queries = call.q.shape[2]
    alive = stats["mass"] > 0
    if queries == 1:  # |0 − j| = j
        return torch.where(alive, start - stats["distance"], 0.0)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    ramp = torch.arange(call.k.shape[2], dtype=wide, device=call.k.device)[:, None].expand(*call.k.shape[:3], 1)
    told = replace(call, q=call.q.detach().to(wide), k=call.k.detach().to(wide), v=ramp)
    mean = regard.attention(told.q, told.k, told.v, **told.arguments, backend=backend)[..., 0]
    here = start + torch.arange(queries, dtype=wide, device=mean.device)
    return torch.where(alive, here - mean / torch.where(alive, stats["mass"], 1.0), 0.0).clamp_min(0.0)
