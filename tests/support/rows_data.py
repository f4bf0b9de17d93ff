"""Rows worth testing on: sharp and flat, tied, with −inf, huge, nearly one-hot; and the maps that kernels have."""

import math

import pytest
import torch

from regard import normalizers

FUSED = [name for name in normalizers.names() if normalizers.get(name).fused]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ONE_OF_EACH = ("softmax", "sigmoid", "entmax15")  # family
ORDERED = [*ONE_OF_EACH, *(name for name in FUSED if name not in ONE_OF_EACH)]
QUICK = {torch.bfloat16: ONE_OF_EACH, torch.float16: ONE_OF_EACH[:1]}  # every map in the other dtypes


def with_dtypes(names: list[str]) -> list:
    """Parameters (name, dtype); 16 bits are slow but for those of QUICK: kernels differ in load and store alone."""
    return [
        pytest.param(
            name,
            dtype,
            id=f"{name}-{str(dtype).removeprefix('torch.')}",
            marks=() if name in QUICK.get(dtype, names) else pytest.mark.slow,
        )
        for dtype in DTYPES
        for name in names
    ]


def slow_but(quick, names: list[str]) -> list:
    """The names as parameters, slow but for those of `quick`: the others take the same path through the code."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def rows(n: int = 37, *, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    """(12, n): each row a kind of its own."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(12, n, generator=g, dtype=torch.float64)
    z[1] *= 10.0  # sharp
    z[2] *= 1e-3  # flat
    z[3] = z[3].round()  # ties
    z[4, ::2] = -math.inf
    z[5] *= 1e4
    z[6] = 0.0
    z[7] = -z[7].abs()  # nothing positive
    z[8, 0] += 30.0  # nearly one-hot
    z[9] -= 1e4
    z[10] += 1e4
    z[11] = -math.inf
    if n > 1:
        z[11, 1] = 2.0
    return z.to(dtype)
