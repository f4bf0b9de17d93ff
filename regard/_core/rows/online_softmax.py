"""Softmax of a row that arrives in pieces: keep (m, ℓ) = (max z, Σ exp(z − m)), and nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._call.validation import check_scores
from regard._facts import reference_dtype, widen


class OnlineSoftmax:
    """m ← max(m, max block), ℓ ← ℓ·e^(m_old − m) + Σ exp(block − m): the softmax of all blocks seen so far.

    Blocks are split along the last dimension; any size, any order, merged in any tree: the result is the whole row's.
    ℓ is kept in float64, so that many small blocks lose nothing.

    >>> import regard, torch
    >>> z = torch.tensor([1.0, 3.0, 2.0, 0.0])
    >>> left, right = regard.OnlineSoftmax().update(z[:1]), regard.OnlineSoftmax().update(z[1:])
    >>> whole = left.merge(right)
    >>> torch.cat([whole.weights(z[:1]), whole.weights(z[1:])])
    tensor([0.0871, 0.6439, 0.2369, 0.0321])
    >>> whole.logsumexp
    tensor(3.4402)
    """

    def __init__(self) -> None:
        self._state: tuple[Tensor, Tensor] | None = None  # (m, ℓ), replaced as one: Ctrl-C leaves the old or the new

    @property
    def max(self) -> Tensor | None:
        """m, one per row; None before the first block."""
        return None if self._state is None else self._state[0]

    @property
    def sum(self) -> Tensor | None:
        """ℓ, one per row, in float64; None before the first block."""
        return None if self._state is None else self._state[1]

    def update(self, block: Tensor) -> OnlineSoftmax:
        """Take in a block (…, n); n may be 0.

        Returns:
            Self.

        Raises:
            TypeError: `block` is not a dense float tensor.
            ValueError: `block` does not fit the rows seen before.
        """
        check_scores(block, "block")
        if block.ndim == 0:
            raise ValueError("block must have at least one dimension, got a scalar; write block[None]")
        if self.max is not None and block.shape[:-1] != self.max.shape:
            raise ValueError(f"block must have rows of shape {tuple(self.max.shape)}, got {tuple(block.shape[:-1])}")
        self._check_device(block, "block")
        z = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32)
        if z.shape[-1]:
            m = z.amax(-1)
        else:
            m = z.new_full(z.shape[:-1], -math.inf)
        part = OnlineSoftmax()
        part._state = m, torch.exp(z - _finite(m)[..., None]).sum(-1, dtype=reference_dtype(z.device))
        return self.merge(part)

    def merge(self, other: OnlineSoftmax) -> OnlineSoftmax:
        """Take in what another has seen.

        Returns:
            Self.

        Raises:
            TypeError: `other` is not an `OnlineSoftmax`.
            ValueError: `other` has rows of another shape or device.
        """
        if not isinstance(other, OnlineSoftmax):
            raise TypeError(f"other must be an OnlineSoftmax, got {type(other).__name__}; update(block) takes tensors")
        if other._state is None:
            return self
        if self._state is None:
            self._state = other._state
            return self
        (mine, my_sum), (theirs, their_sum) = self._state, other._state
        if mine.shape != theirs.shape:
            raise ValueError(f"other must have rows of shape {tuple(mine.shape)}, got {tuple(theirs.shape)}")
        self._check_device(theirs, "other")
        m = torch.maximum(mine, theirs)
        safe = widen(_finite(m))
        self._state = m, my_sum * torch.exp(widen(mine) - safe) + their_sum * torch.exp(widen(theirs) - safe)
        return self

    @property
    def logsumexp(self) -> Tensor:
        """m + log ℓ; −inf for rows that saw nothing, inf for rows that saw inf."""
        m, total = self._seen()
        nothing = m == -math.inf
        lse = (_finite(m) + torch.log(total.masked_fill(nothing, 1.0))).to(m.dtype)  # log 0 has no gradient of 0
        return lse.masked_fill(m == math.inf, math.inf).masked_fill(nothing, -math.inf)

    def weights(self, block: Tensor) -> Tensor:
        """exp(block − m) / ℓ: the weights of a block within the whole.

        Returns:
            The weights, in the shape and dtype of `block`.

        Raises:
            TypeError: `block` is not a dense float tensor.
            ValueError: No block was seen, or `block` does not fit the rows seen.
        """
        m, total = self._seen()
        check_scores(block, "block")
        if block.ndim == 0 or block.shape[:-1] != m.shape:
            raise ValueError(f"block must have the shape {(*m.shape, 'n')} of the rows seen, got {tuple(block.shape)}")
        self._check_device(block, "block")
        e = torch.exp(block.to(m.dtype) - _finite(m)[..., None])
        return (e / torch.where(total == 0, 1.0, total)[..., None]).to(block.dtype)

    def _check_device(self, x: Tensor, name: str) -> None:
        if self.max is not None and x.device != self.max.device:
            raise ValueError(f"{name} must be on {self.max.device}, where the rows seen are, got {x.device}")

    def _seen(self) -> tuple[Tensor, Tensor]:
        if self._state is None:
            raise ValueError("this OnlineSoftmax has seen no block yet; call update(block) first")
        return self._state


def _finite(m: Tensor) -> Tensor:
    """m with −inf (nothing seen) replaced by 0, so that exp(−inf − m) is 0 and not NaN."""
    return m.masked_fill(m == -math.inf, 0.0)
