"""The dtype of sums and row states."""

from __future__ import annotations

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and row states: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
