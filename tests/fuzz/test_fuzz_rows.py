"""Rows of any shape, layout, dtype and size of score against the float64 reference, and short ones against mpmath."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from fuzz_data import DTYPES, LEVELS, NAMES, cases, masks, shapes, steepest, values
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import normalizers

pytest.importorskip("numba")
ROUNDED = (0.3, 7.0)  # temperatures by which no score divides exactly


def truth(scores, name, dim, t, mask):
    return regard.normalize(scores.double(), name, dim, t, mask, backend="reference")


def allowed(scores, name, dim, t, mask, exact):
    """Some roundings in the working precision, whatever the size of the scores, and one of the result."""
    working = torch.float64 if scores.dtype == torch.float64 else torch.float32
    eps, stored = torch.finfo(working).eps, torch.finfo(scores.dtype)
    member = normalizers.get(name)
    size = scores.double().masked_fill(~scores.isfinite(), 0.0).abs() / (t if 0 < t < math.inf else 1.0)
    slope = 1.0
    if member.name == "softpick":  # exp(s) − 1 cancels where all scores are small: its sum says how much
        hidden = ~scores.isfinite() if mask is None else ~scores.isfinite() | ~mask
        small = size.masked_fill(hidden, 0.0)
        slope = 1.0 / small.amax(dim, keepdim=True).clamp(eps, 1.0) if small.numel() else 1.0
    if member.name == "entmax":
        slope = 8.0  # a power goes through a logarithm of that size
    coarse = t in ROUNDED or name == "entmax(alpha=1.05)"  # the reference scales before it subtracts, and rounds
    reference = 1e-16 * size.amax(dim, keepdim=True) if size.numel() and coarse else 0.0
    return 16 * (eps + reference) * slope + stored.eps * exact.abs() + stored.tiny


@cases(0.3)
@given(st.data())
def test_any_row(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(shapes())
    scores = data.draw(values(shape, dtype))
    name = data.draw(st.sampled_from(NAMES))
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    t = data.draw(st.sampled_from([1.0, 1.0, 0.25, 8.0, *ROUNDED, 0.0, math.inf]))
    mask = data.draw(masks(shape))
    p = regard.normalize(scores, name, dim, t, mask)
    assert p.shape == scores.shape and p.dtype == dtype and p.device == scores.device
    exact = truth(scores, name, dim, t, mask)
    assert torch.equal(p.isnan(), exact.isnan()), "NaN stays in its row, and only there"
    bound, good = allowed(scores, name, dim, t, mask, exact), ~exact.isnan()
    assert ((p.double() - exact).abs() <= bound)[good].all(), float(((p.double() - exact).abs() - bound)[good].max())
    if mask is not None:
        hidden = ~mask.expand(shape) & ~p.isnan()
        assert (p[hidden] == 0).all()


@cases(0.1)
@given(st.data())
def test_any_gradient(data):
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    shape = data.draw(shapes(1024))
    name = data.draw(st.sampled_from(NAMES))
    size = data.draw(st.sampled_from([0.1, 1.0, 10.0]) | st.sampled_from(LEVELS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    scores = (torch.randn(shape, generator=generator, dtype=torch.float64) * size).clamp(-3e38, 3e38).to(dtype)
    g = torch.randn(shape, generator=generator).to(dtype)
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    t = data.draw(st.sampled_from([1.0, 0.5, 4.0]))
    mask = data.draw(masks(shape))
    ours, theirs = scores.clone().requires_grad_(), scores.double().requires_grad_()
    (dz,) = torch.autograd.grad(regard.normalize(ours, name, dim, t, mask), ours, g)
    (exact,) = torch.autograd.grad(truth(theirs, name, dim, t, mask), theirs, g.double())
    if not dz.numel():
        return
    steep = 30.0 if name.startswith("entmax(") or name == "entmax15" else 1.0  # √p near 0: a slope that rounds coarsely
    steep *= 1.0 + 1.0 / max(size, 1e-6) if name == "softpick" else 1.0  # exp(s) − 1 cancels
    slope = steepest(theirs.detach(), name, dim, t, mask)
    bound = 200 * (torch.finfo(dtype).eps + 1e-16 * size * (name == "entmax(alpha=1.05)")) * steep * slope
    bound = bound * (1.0 + float(g.abs().max())) + torch.finfo(dtype).smallest_normal  # below, a machine may flush to 0
    away = slope.expand(shape) > (1e5 if name == "softpick" else 1e37)  # all is rounding; the gradient itself overflows
    if normalizers.get(name).family == "threshold":
        away = away | near_threshold(theirs.detach(), name, dim, t, mask)
        bound *= 20
    error = (dz.double() - exact).abs().masked_fill(away, 0.0)
    assert (error <= bound).all(), float((error / bound).max())


def near_threshold(z, name, dim, t, mask):
    """Rows in which a weight is close to 0: on which side of the threshold rounding puts it decides the gradient."""
    p = truth(z, name, dim, t, mask)
    nearby = (p > 0) & (p < 1e-3)
    return nearby.any(dim, keepdim=True).expand(z.shape) if z.ndim else nearby


@cases(0.05)
@given(
    st.lists(st.floats(-60, 60) | st.floats(-1e38, 1e38) | st.sampled_from(LEVELS), min_size=1, max_size=6),
    st.sampled_from(["softmax", "softmax1", "sigmoid", "relu", "softpick", "sparsemax", "entmax15"]),
)
def test_short_rows_against_mpmath(row, name):
    p = regard.normalize(torch.tensor(row, dtype=torch.float64), name).tolist()
    with mpmath.workdps(120):  # 50 digits of a difference of numbers of any size
        exact = by_mpmath([mpmath.mpf(x) for x in row], name)
        worst = max(abs(mpmath.mpf(ours) - theirs) for ours, theirs in zip(p, exact, strict=True))
        smallest = min((abs(x) for x in row if x), default=1.0)
        lost = 1e-15 / min(1.0, max(smallest, 1e-15)) if name == "softpick" else 0.0
        assert worst <= 4e-15 + lost + 1e-12 * (name == "softpick"), float(worst)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("t", [0.1, 3.0])
def test_scores_so_large_that_the_quotient_rounds_or_overflows(name, t):
    """Found by this fuzz: z/T rounds by more than 1 above 1e8, and overflows at 3e38; z − max z does not."""
    sizes = [(1, 3e38), (2, 3e38), (40, 1e8), (40, 2e11), (300, 1e9), (300, 3e38), (40, -3e38)]
    rows = [torch.linspace(0.5, 1.0, n) * top for n, top in sizes]
    for scores in [*rows, 2.0**26 + 8 * torch.arange(40.0)]:
        p = regard.normalize(scores, name, temperature=t)
        exact = regard.normalize(scores.double(), name, temperature=t, backend="reference")
        torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-6)
        if normalizers.get(name).family == "threshold" or name == "softmax":
            p = regard.normalize(scores.expand(2, -1), name, temperature=torch.tensor([[t], [1.0]]))[0]
            torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_scalar_with_a_mask_that_does_not_fit():
    """Found by this fuzz: an AttributeError."""
    for mask in ("visible", torch.ones(2, dtype=torch.bool), torch.ones(1)):
        with pytest.raises((TypeError, ValueError), match="mask"):
            regard.softmax(torch.tensor(1.0), mask=mask)


def by_mpmath(z, name):
    e = [mpmath.exp(x) for x in z]
    if name == "softmax":
        return [x / sum(e) for x in e]
    if name == "softmax1":
        return [x / (1 + sum(e)) for x in e]
    if name == "sigmoid":
        return [1 / (1 + mpmath.exp(-x)) for x in z]
    if name == "relu":
        total = sum(max(x, 0) for x in z)
        return [max(x, 0) / total if total else mpmath.mpf(0) for x in z]
    if name == "softpick":
        total = sum(abs(x - 1) for x in e)
        return [max(x - 1, 0) / total if total else mpmath.mpf(0) for x in e]
    gain, power = (1, 1) if name == "sparsemax" else (mpmath.mpf(1) / 2, 2)
    low, high = max(z) * gain - 1, max(z) * gain
    for _ in range(170):
        middle = (low + high) / 2
        if sum(max(x * gain - middle, 0) ** power for x in z) > 1:
            low = middle
        else:
            high = middle
    return [max(x * gain - low, 0) ** power for x in z]
