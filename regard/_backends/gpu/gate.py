"""The output gate on a GPU, o·σ(g), in one kernel each way: every number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard._backends.gpu.launcher import launch, on_device_of, tensor_key

NUMBERS = 8192  # of a tensor that one program holds


def forward(o: Tensor, g: Tensor) -> Tensor:
    """o·σ(g) of o [B, H, M, E] and g [B, H, M, 1] or [B, H, M, E], any strides."""
    out = torch.empty_like(o)
    launch_rows(gate_forward, (o, g, out), constants=(_is_per_element(o, g),))
    return out


def backward(do: Tensor, o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(do·σ(g), do·o·σ′(g)) of the upstream gradient do and the ungated o; the second summed over E if g has 1."""
    dx, dg = torch.empty_like(o), torch.empty_like(g)
    launch_rows(gate_backward, (o, g, do, dx, dg), constants=(_is_per_element(o, g),))
    return dx, dg


def _is_per_element(o: Tensor, g: Tensor) -> bool:
    return g.shape[3] > 1 or o.shape[3] == 1


def launch_rows(kernel, tensors: tuple[Tensor, ...], numbers: tuple = (), constants: tuple = ()) -> None:
    """Launch a kernel over the rows of tensors [B, H, M, E], of any strides; a program holds NUMBERS of the first."""
    batch, heads, queries, width = tensors[0].shape
    if not tensors[0].numel():
        return
    columns = triton.next_power_of_2(width)
    rows = min(triton.next_power_of_2(queries), max(1, NUMBERS // columns))
    strides = [stride for x in tensors for stride in x.stride()]
    arguments = *tensors, *strides, heads, queries, width, *numbers
    warps = min(8, max(1, rows * columns // 512))
    with on_device_of(tensors[0]):
        programs = batch * heads * triton.cdiv(queries, rows)
        launch(tensor_key(*tensors), kernel, programs, arguments, (*constants, rows, columns), num_warps=warps)


@triton.jit
def locate(heads, queries, ROWS: tl.constexpr):
    """Return batch entry, head and rows [ROWS] of this program, in 64 bits."""
    blocks = tl.cdiv(queries, ROWS)
    at = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: those written last may still be in the cache
    head, first = at // blocks, at % blocks * ROWS
    return (head // heads).to(tl.int64), (head % heads).to(tl.int64), (first + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def point(x, b, h, i, e, sb, sh, si, se):
    """Return pointers to a tile [ROWS, COLUMNS], or [ROWS, 1] where e is 0."""
    return x + b * sb + h * sh + i[:, None] * si + e * se


@triton.jit
def sigmoid(g):
    return 1.0 / (1.0 + tl.exp(-g.to(tl.float32)))


@triton.jit
def gate_forward(
    o, g, out,
    ob, oh, oi, oe, gb, gh, gi, ge, tb, th, ti, te,
    heads, queries, width,
    PER_ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = o·σ(g)."""
    b, h, i = locate(heads, queries, ROWS)
    e = tl.arange(0, COLUMNS)[None, :]
    exists = (i < queries)[:, None]
    inside = exists & (e < width)
    x = tl.load(point(o, b, h, i, e, ob, oh, oi, oe), mask=inside, other=0.0)
    if PER_ELEMENT:
        logit = tl.load(point(g, b, h, i, e, gb, gh, gi, ge), mask=inside, other=0.0)
    else:
        logit = tl.load(point(g, b, h, i, 0, gb, gh, gi, ge), mask=exists, other=0.0)
    gated = x.to(tl.float32) * sigmoid(logit)
    tl.store(point(out, b, h, i, e, tb, th, ti, te), gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(
    o, g, do, dx, dg,
    ob, oh, oi, oe, gb, gh, gi, ge, ub, uh, ui, ue, xb, xh, xi, xe, db, dh, di, de,
    heads, queries, width,
    PER_ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = do·σ(g), dg = do·o·σ·(1 − σ), summed over a row where the gate is per head."""
    b, h, i = locate(heads, queries, ROWS)
    e = tl.arange(0, COLUMNS)[None, :]
    exists = (i < queries)[:, None]
    inside = exists & (e < width)
    x = tl.load(point(o, b, h, i, e, ob, oh, oi, oe), mask=inside, other=0.0).to(tl.float32)
    up = tl.load(point(do, b, h, i, e, ub, uh, ui, ue), mask=inside, other=0.0).to(tl.float32)
    if PER_ELEMENT:
        logit = tl.load(point(g, b, h, i, e, gb, gh, gi, ge), mask=inside, other=0.0)
    else:
        logit = tl.load(point(g, b, h, i, 0, gb, gh, gi, ge), mask=exists, other=0.0)
    s = sigmoid(logit)
    tl.store(point(dx, b, h, i, e, xb, xh, xi, xe), (up * s).to(dx.dtype.element_ty), mask=inside)
    if PER_ELEMENT:
        slope = up * x * s * (1.0 - s)
        tl.store(point(dg, b, h, i, e, db, dh, di, de), slope.to(dg.dtype.element_ty), mask=inside)
    else:
        slope = tl.sum(up * x, 1)[:, None] * s * (1.0 - s)
        tl.store(point(dg, b, h, i, 0, db, dh, di, de), slope.to(dg.dtype.element_ty), mask=exists)
