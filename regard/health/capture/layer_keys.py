"""Which layer a call belongs to: its module, and which use of it within a forward.

A forward begins where a module is given tokens, so a model that generates inside another's forward begins one with each
token it makes. Within a forward a module's n-th call is its n-th use, as in a block that is run again on what it gave
(ALBERT), but for a call whose keys continue those of an earlier one: that is a cache that grew, and the same use.
From `MANY` uses on nobody means them as layers, and they are read together (`measure.folded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.health.capture.call import Call

MANY = 64


@dataclass
class Keys:
    """The keys of a use, as far as one must remember them to know them again: how many, and the first, [D]."""

    many: int
    first: Tensor

    def grown_to(self, call: Call) -> bool:
        """Are a call's keys these and, behind them, one for each of its queries?"""
        queries, keys = call.q.shape[2], call.k.shape[2]
        return keys == self.many + queries and self.first.equal(_first(call))


class Uses:
    """Counts them. `step` is the forward's token, as `intercept.step` gives it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, str], list[Keys]] = {}
        self.step: Any = None

    def begin(self) -> None:
        self._seen.clear()
        self.step = None

    def of(self, call: Call, name: str, step: Any) -> int:
        """0, 1, … up to MANY − 1, which all later ones share."""
        self.step = step
        seen = self._seen.setdefault((step, name), [])
        if call.k.numel() == 0 or call.obstacle is not None:  # not looked at
            return min(len(seen), MANY - 1)
        grown = (use for use, keys in enumerate(seen) if keys.grown_to(call))
        use = next(grown, min(len(seen), MANY - 1))
        keys = Keys(call.k.shape[2], _first(call).clone())
        if use < len(seen):
            seen[use] = keys
        else:
            seen.append(keys)
        return use


def _first(call: Call) -> Tensor:
    return call.k.detach()[0, 0, 0]


def given_tokens(inputs: tuple, named: dict) -> bool:
    """Is the first tensor that a module is given one of whole numbers?

    >>> from regard.health.capture.layer_keys import given_tokens
    >>> given_tokens((torch.arange(4),), {}), given_tokens((torch.randn(4, 8),), {"position_ids": torch.arange(4)})
    (True, False)
    """
    for x in (*inputs, *named.values()):
        if isinstance(x, Tensor):
            return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return False
