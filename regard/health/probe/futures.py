"""Does a later token change an earlier output? Asked at three places, because a mask may be right in some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.health.probe.rounding import row_changes
from regard.health.tokens.text import TokenBatch, exchange_tokens

PLACES = {"the second half": 1 / 2, "the last quarter": 3 / 4, "the last token": 1.0}


@dataclass(frozen=True)
class Leak:
    """What other tokens from `cut` on do to the outputs before it."""

    place: str  # of the tokens that were changed
    cut: int
    amount: float  # largest relative change of an output row before `cut`
    first: int  # the first row that has half of this change

    def __str__(self) -> str:
        return f"Other tokens in {self.place} change earlier outputs by {self.amount:.2g} of their size"


def change_later(batch: TokenBatch, cut: int) -> TokenBatch:
    """The batch with other tokens from position `cut` on."""
    ids = batch.targets
    later = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2]) >= cut
    return batch.with_targets(exchange_tokens(ids, later))


def find_leaks(run: Callable[[TokenBatch], Tensor], batch: TokenBatch, before: Tensor | None = None) -> list[Leak]:
    """One `Leak` for each of `PLACES`; `run` returns the outputs [B, N, …] of a batch, `before` those of this one."""
    before = run(batch) if before is None else before
    length = batch.targets.shape[1]
    found = []
    for place, share in PLACES.items():
        cut = min(max(1, int(share * length)), length - 1)
        change = row_changes(before[:, :cut], run(change_later(batch, cut))[:, :cut]).amax(0)  # [cut]
        amount = float(change.max())
        found.append(Leak(place, cut, amount, int((change >= amount / 2).nonzero()[0])))
    return found
