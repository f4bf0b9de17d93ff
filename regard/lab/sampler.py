"""`Sampler`: a seeded source of random queries, keys and scores for an experiment.

>>> from regard.lab.sampler import Sampler
>>> Sampler(0, "dot-mean").normal(2, 3).shape
torch.Size([2, 3])
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Sampler:
    """Draws random numbers that depend on the seed and the claim's name only, not on which claims ran before."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"{name} {seed}".encode(), digest_size=4).digest()  # torch's CPU generator: 32 bits
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return unit-normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers uniform in [low, high)."""
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=dtype)

    def dots(self, d: int, blocks: int, queries: int = 32, keys: int = 32) -> Tensor:
        """Return q·k (blocks, queries, keys) for unit-normal q and k of d entries.

        Blocks are independent. Scores of a block share queries and keys, so a block counts as one sample.
        """
        return self.normal(blocks, queries, d) @ self.normal(blocks, d, keys)
