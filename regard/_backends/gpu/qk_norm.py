"""QK-norm on a GPU, x/√(mean x² + ε²) over the last dim, in one kernel each way: every number is read and written once.

torch's own kernels for this norm take a program per row and want contiguous rows. Heads are 64 to 256 wide, and their
queries are views of a projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard._backends.gpu.gate import launch_rows, locate, point


def forward(x: Tensor, eps: float) -> Tensor:
    """x/√(mean x² + eps²) of x [B, H, M, D], any strides."""
    y = torch.empty_like(x)
    launch_rows(norm_forward, (x, y), (eps * eps,))
    return y


def backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    """r·(dy − r²·x·mean(x·dy)) with r = 1/√(mean x² + eps²)."""
    dx = torch.empty_like(x)
    launch_rows(norm_backward, (x, dx, dy), (eps * eps,))
    return dx


@triton.jit
def load_rows(x, b, h, i, e, sb, sh, si, se, inside, width, eps):
    """Return x in float32 and its r [ROWS, 1]."""
    x = tl.load(point(x, b, h, i, e, sb, sh, si, se), mask=inside, other=0.0).to(tl.float32)
    return x, 1.0 / tl.sqrt_rn(tl.sum(x * x, 1)[:, None] / width + eps)


@triton.jit
def norm_forward(
    x, y, xb, xh, xi, xe, yb, yh, yi, ye, heads, queries, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """y = x·r."""
    b, h, i = locate(heads, queries, ROWS)
    e = tl.arange(0, COLUMNS)[None, :]
    inside = (i < queries)[:, None] & (e < width)
    x, r = load_rows(x, b, h, i, e, xb, xh, xi, xe, inside, width, eps)
    tl.store(point(y, b, h, i, e, yb, yh, yi, ye), (x * r).to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    x, dx, dy, xb, xh, xi, xe, db, dh, di, de, ub, uh, ui, ue, heads, queries, width, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = r·(dy − y·mean(y·dy))."""
    b, h, i = locate(heads, queries, ROWS)
    e = tl.arange(0, COLUMNS)[None, :]
    inside = (i < queries)[:, None] & (e < width)
    x, r = load_rows(x, b, h, i, e, xb, xh, xi, xe, inside, width, eps)
    up = tl.load(point(dy, b, h, i, e, ub, uh, ui, ue), mask=inside, other=0.0).to(tl.float32)
    y = x * r
    found = r * (up - y * (tl.sum(y * up, 1)[:, None] / width))
    tl.store(point(dx, b, h, i, e, db, dh, di, de), found.to(dx.dtype.element_ty), mask=inside)
