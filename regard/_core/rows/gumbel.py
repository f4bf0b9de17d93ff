"""Sampling that can be differentiated: softmax((z + g)/T) with Gumbel noise g = −log(−log U)."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._core.rows.functions import softmax
from regard._core.rows.validation import check_dim, check_flag, check_scores


def gumbel_softmax(
    z: Tensor,
    temperature: float | Tensor = 1.0,
    hard: bool = False,
    dim: int = -1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """softmax((z + g)/T), g ~ Gumbel(0, 1): its argmax is a sample of softmax(z).

    `hard` returns the one-hot sample, with the gradient of the soft one (straight-through). The same generator state
    gives the same sample.

    >>> import regard, torch
    >>> one = regard.gumbel_softmax(torch.zeros(5), 0.5, hard=True, generator=torch.Generator().manual_seed(0))
    >>> float(one.sum())
    1.0

    Returns:
        The sample, in the shape and dtype of `z`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: `dim` or `temperature` lies outside its range.
    """
    check_scores(z, "z")
    axis = check_dim(z, dim)
    hard = check_flag(hard, "hard")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    drawn = torch.empty_like(z, dtype=wide, memory_format=torch.contiguous_format).exponential_(generator=generator)
    noise = -torch.log(drawn.clamp_min(torch.finfo(wide).tiny))
    soft = softmax(z.to(wide) + noise, axis, temperature)
    if not hard or not z.numel():
        return soft.to(z.dtype)
    at = (z.detach().to(wide) + noise).argmax(axis, keepdim=True)
    one_hot = torch.zeros_like(soft).scatter(axis, at, 1.0)
    one_hot = one_hot.where(soft.detach().amax(axis, keepdim=True) != 0, 0.0)  # nothing to choose from: choose nothing
    return (one_hot + (soft - soft.detach())).to(z.dtype)
