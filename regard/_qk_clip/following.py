"""Do a head's queries and keys follow its weights? With QK-norm inside a forward not: clipping would never end."""

from __future__ import annotations

import torch
from torch import Tensor

ENOUGH = 0.4  # weights shrunk to this, and queries and keys that did not shrink by half of it (in logarithms): no


class Following:
    """What the clips of one layer did to it, head by head [H], since a head last followed or its weights grew."""

    def __init__(self, lengths: Tensor, sizes: Tensor) -> None:
        self.lengths, self.sizes = lengths, sizes
        self.shrunk = torch.ones_like(lengths)
        self.given_up = torch.zeros_like(lengths, dtype=torch.bool)

    def judge(self, lengths: Tensor, sizes: Tensor | None, factors: Tensor) -> Tensor:
        """The factors to apply: a head that does not follow gets back what was taken, and is left alone from then on.

        lengths: of the queries and keys in the last forward, |q|·|k|; sizes: of the weights that made them, None where
        that forward was not watched.
        """
        if sizes is None:
            sizes = torch.full_like(lengths, torch.nan)
        fell = sizes / self.sizes
        fresh = ~(fell < 1.0) | ~(lengths > self.lengths * fell.sqrt())
        stuck = ~fresh & ~self.given_up & (fell < ENOUGH)
        factors = torch.where(stuck, 1.0 / self.shrunk, torch.where(self.given_up, 1.0, factors))
        self.given_up = self.given_up | stuck
        self.lengths, self.sizes = torch.where(fresh, lengths, self.lengths), torch.where(fresh, sizes, self.sizes)
        self.shrunk = torch.where(fresh, factors, self.shrunk * factors)
        return factors
