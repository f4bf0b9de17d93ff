"""What an experiment works with: a seeded source of queries, keys and scores.

>>> from regard.lab.bench import Bench
>>> Bench(0, "dot-mean").normal(2, 3).shape
torch.Size([2, 3])
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Bench:
    """Random numbers that depend on the seed and the claim's name only, not on which claims ran before."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(
            f"{name} {seed}".encode(), digest_size=4
        ).digest()  # torch's CPU generator takes 32 bits
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest))

    def normal(self, *shape: int, dtype=torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype=torch.float32) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=dtype)

    def dots(self, d: int, blocks: int, queries: int = 32, keys: int = 32) -> Tensor:
        """q·k for unit normal q and k of d entries: (blocks, queries, keys).

        Blocks are independent. Inside a block scores share queries and keys, so a block counts as one sample.
        """
        return self.normal(blocks, queries, d) @ self.normal(blocks, d, keys)
