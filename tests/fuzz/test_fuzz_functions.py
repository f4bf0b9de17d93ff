"""Every other function of rows and of masks against float64: tensors per row, logarithms, derivatives, blocks."""

from __future__ import annotations

import math

import pytest
import torch
from fuzz_data import DTYPES, NAMES, cases, laid_out, shapes, steepest, values
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import normalizers

pytest.importorskip("numba")

ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
SMOOTH = ["softmax", "softmax1", "sigmoid", "sigmoid(bias=-3)"]


def per_row(draw, shape, dim, choices, dtype=torch.float64):
    """A tensor with size 1 in `dim` and 1 or all in the others, drawn from the choices."""
    sizes = [1 if place == dim or draw(st.booleans()) else size for place, size in enumerate(shape)]
    picks = torch.tensor(choices, dtype=dtype)
    at = torch.randint(len(choices), sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32))))
    return laid_out(draw, picks[at])


def drawn_rows(data, special=True, most=1024):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(shapes(most).filter(len))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    return data.draw(values(shape, dtype, special)), dim


def assert_near(ours, exact, bound):
    exact = exact.to(ours.dtype).double()  # beyond the range of ours it is ±inf
    assert torch.equal(ours.isnan(), exact.isnan())
    good = ~exact.isnan() & (ours.double() != exact)
    assert ((ours.double() - exact).abs() <= bound)[good].all(), float(
        ((ours.double() - exact).abs() - bound)[good].max()
    )


@cases(0.05)
@given(st.data())
def test_a_temperature_per_row(data):
    scores, dim = drawn_rows(data)
    name = data.draw(st.sampled_from([*SMOOTH, "relu", "sparsemax", "entmax15", "entmax(alpha=1.25)"]))
    t = per_row(data.draw, scores.shape, dim % scores.ndim, [0.5, 1.0, 4.0, 0.0, math.inf])
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    scores = scores.masked_fill(scores.to(wide).abs() > 1e38, 1.0)  # a quotient that overflows is ±inf, as in torch
    p = regard.normalize(scores, name, dim, t.to(wide))
    assert p.shape == scores.shape and p.dtype == scores.dtype
    exact = torch.stack(
        [
            regard.normalize(scores.double(), name, dim, float(one), backend="reference")
            for one in (0.5, 1, 4, 0, math.inf)
        ]
    )
    kinds = torch.stack([(t == one).expand(scores.shape) for one in (0.5, 1.0, 4.0, 0.0, math.inf)])
    exact = torch.where(kinds, exact, 0.0).sum(0).masked_fill((exact.isnan() & kinds).any(0), math.nan)
    steep = 32.0 if name.startswith("entmax") else 8.0  # none of these temperatures makes a quotient round
    rounded = 2 * ROUNDING[scores.dtype] * exact.abs() + torch.finfo(scores.dtype).tiny
    assert_near(p, exact, 4 * steep * ROUNDING[wide] + rounded)


@cases(0.05)
@given(st.data())
def test_an_alpha_per_row(data):
    scores, dim = drawn_rows(data, special=False)
    choices = [1.05, 1.3, 1.5, 2.0]
    alpha = per_row(data.draw, scores.shape, dim % scores.ndim, choices)
    p = regard.entmax(scores, alpha.to(torch.float64 if scores.dtype == torch.float64 else torch.float32), dim)
    exact = sum(
        torch.where(
            (alpha == one).expand(scores.shape),
            regard.normalize(scores.double(), f"entmax(alpha={one})", dim, backend="reference"),
            0.0,
        )
        for one in choices
    )
    working = torch.finfo(torch.float64 if scores.dtype == torch.float64 else torch.float32).eps
    size = float(scores.double().abs().amax()) if scores.numel() else 0.0
    reference = 1e-16 * size  # which scales before it subtracts, and rounds
    rounded = 2 * ROUNDING[scores.dtype] * exact.abs() + torch.finfo(scores.dtype).tiny
    assert_near(p, exact, 100 * (working + reference) + rounded)


@cases(0.05)
@given(st.data())
def test_logarithms_and_blocks(data):
    scores, dim = drawn_rows(data)
    scores = scores.masked_fill(scores.isnan() | (scores == math.inf), 2.0)
    scores = scores.masked_fill((scores.abs() > 1.5e38) & (scores != -math.inf), 2.0)  # a difference stays in float32
    t = data.draw(st.sampled_from([1.0, 2.0]))
    whole = scores.double() / t
    eps, size = 4 * ROUNDING[scores.dtype], 1.0 + whole.abs().masked_fill(whole.isinf(), 0.0)
    if scores.shape[dim]:
        assert_near(regard.logsumexp(scores, dim, t), whole.logsumexp(dim), eps * size.amax(dim))
        log_p = regard.log_softmax(scores, dim, t)
        empty = (whole == -math.inf).all(dim, keepdim=True)
        exact = torch.log_softmax(whole.movedim(dim, -1).contiguous(), -1).movedim(-1, dim)  # over rows torch sums best
        assert_near(
            log_p.masked_fill(empty, 0.0),
            exact.masked_fill(empty, 0.0),
            eps * (size.amax(dim, keepdim=True) + exact.abs()),
        )
    rows = scores.movedim(dim, -1)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows.shape[-1]), max_size=4)))
    blocks = [rows[..., a:b] for a, b in zip([0, *cuts], [*cuts, rows.shape[-1]], strict=True)]
    parts = [regard.OnlineSoftmax().update(block) for block in blocks]
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [parts[at].merge(parts[at + 1])]
    p = torch.cat([parts[0].weights(block) for block in blocks], -1)
    exact = regard.normalize(scores.double(), "softmax", dim, backend="reference").movedim(dim, -1)
    finest = ROUNDING[torch.float64 if scores.dtype == torch.float64 else torch.float32]
    assert_near(p, exact, 2000 * finest * exact + ROUNDING[scores.dtype] * exact + torch.finfo(scores.dtype).tiny)


@cases(0.05)
@given(st.data())
def test_derivatives_in_closed_form(data):
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    shape = (*data.draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])), data.draw(st.sampled_from([1, 2, 5, 17])))
    name = data.draw(st.sampled_from(NAMES))
    t = data.draw(st.sampled_from([1.0, 0.5, 3.0]))
    z = data.draw(values(shape, dtype, special=False)).clamp(-50.0, 50.0)
    g = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))).to(dtype)
    whole = z.double().clone().requires_grad_()
    (exact,) = torch.autograd.grad(regard.normalize(whole, name, -1, t, backend="reference"), whole, g.double())
    if normalizers.get(name).family == "threshold":  # where rounding decides who is in the support
        p = regard.normalize(z.double(), name, -1, t, backend="reference")
        near = ((p < 1e-3) & (p > 0)).any(-1, keepdim=True) | (z.diff(dim=-1, prepend=z[..., :1]).abs() < 1e-6).any(
            -1, keepdim=True
        )
    else:
        near = torch.zeros(*shape[:-1], 1, dtype=torch.bool)
    steep = {"softpick": 1.0 + 1.0 / max(float(z.abs().amax()), 1e-6) if z.numel() else 1.0}.get(name, 1.0)
    slope = steepest(z.double(), name, -1, t, None) if z.numel() else torch.ones(*shape[:-1], 1, dtype=torch.float64)
    near = near | (slope > (1e5 if name == "softpick" else 1e37))  # all is rounding; the gradient itself overflows
    bound = 4000 * torch.finfo(dtype).eps * steep * (1.0 + 50.0 / t) * slope
    dz, full = regard.vjp(z, g, name, t), regard.jacobian(z, name, t)
    assert full.shape == (*shape, shape[-1])
    product = (full.double().transpose(-1, -2) @ g.double()[..., None])[..., 0]
    for found in (dz.double(), product):
        assert ((found - exact).abs() <= bound).masked_fill(near, True).all(), float((found - exact).abs().max())
    if name == "softmax" and t == 1.0:
        again = regard.softmax_backward(g, regard.softmax(z))
        assert ((again.double() - exact).abs() <= bound).all()


@cases(0.025)
@given(st.data())
def test_samples_are_rows(data):
    z, dim = drawn_rows(data)
    z = z.masked_fill(z.isnan() | (z == math.inf), 2.0)
    seed, hard = data.draw(st.integers(0, 2**32)), data.draw(st.booleans())
    t = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
    one, two = (regard.gumbel_softmax(z, t, hard, dim, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert torch.equal(one, two) and one.shape == z.shape and one.dtype == z.dtype
    assert not one.isnan().any() and (one[z == -math.inf] == 0).all()
    filled = (z != -math.inf).any(dim) if z.shape[dim] else torch.zeros_like(z.sum(dim), dtype=torch.bool)
    total = one.double().sum(dim)
    assert ((total - filled.double()).abs() <= 2 * ROUNDING[z.dtype] * max(z.shape[dim], 1)).all()
    if hard:
        assert ((one == 0) | (one == 1)).all()


@cases(0.025)
@given(st.data())
def test_masks_are_what_they_say(data):
    n, keys = data.draw(st.integers(0, 9)), data.draw(st.none() | st.integers(0, 9))
    left, right = (data.draw(st.none() | st.integers(0, 10)) for _ in range(2))
    width = n if keys is None else keys
    seen = [
        [(left is None or j >= i - left) and (right is None or j <= i + right) for j in range(width)] for i in range(n)
    ]
    assert regard.masks.window(n, keys, left, right).tolist() == seen
    assert regard.masks.causal(n, keys).tolist() == [[j <= i for j in range(width)] for i in range(n)]
    lengths = data.draw(st.lists(st.integers(0, 9), max_size=4))
    most = data.draw(st.integers(max(lengths, default=0), 12))
    assert regard.masks.padding(lengths, most).tolist() == [[j < length for j in range(most)] for length in lengths]
