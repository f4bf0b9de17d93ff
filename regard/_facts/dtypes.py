"""The dtype of sums and row states, and of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._facts.device import supports_float64


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and row states: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference_dtype(device: torch.device) -> torch.dtype:
    """The dtype that the reference computes in: float64, or float32 on a device without it."""
    return torch.float64 if supports_float64(device) else torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype of the reference."""
    return x.to(reference_dtype(x.device))
