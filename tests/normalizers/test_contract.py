"""The contract that every normaliser keeps, a ninth too: forward and gradient against float64, on every path."""

import math

import pytest
import torch
from rows_data import FUSED, rows, with_dtypes

import regard
from regard import normalizers
from regard.statistics import Terms, solve_shift

NAMES = normalizers.names()


def plain(choice, z):
    """The family's formula in plain torch, in the precision of z: the same mathematics without our kernels."""
    if not choice.fused:
        return choice.reference(z, None, choice.theta)
    seen = z > -math.inf
    shift = solve_shift(z, seen, choice)
    terms = Terms(choice)
    u, v, _, _ = (x.masked_fill(~seen, 0.0) for x in terms(z.masked_fill(~seen, 0.0), shift))
    if choice.family != "ratio":
        return u
    total = v.sum(-1, keepdim=True) + terms.rest(shift)
    return u / total.masked_fill(total == 0, 1.0)


def bound(exact, same_precision, dtype):
    """Twice what plain torch in the same precision is off, plus the rounding of the result."""
    eps = torch.finfo(dtype).eps
    return 2.0 * (same_precision.double() - exact).abs().amax() + 8.0 * eps * exact.abs().amax() + 1e-30


@pytest.mark.drawn(30)
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(NAMES))
@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
def test_forward_is_the_reference(name, dtype, n):
    choice = normalizers.get(name)
    z = rows(n, dtype=dtype)
    exact = choice.reference(z.double(), None, choice.theta)
    same = plain(choice, z.float() if dtype != torch.float64 else z).to(dtype)
    ours = regard.normalize(z, name)
    assert ours.dtype == dtype
    assert float((ours.double() - exact).abs().max()) <= float(bound(exact, same, dtype))


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(NAMES))
def test_backward_is_the_references(name, dtype):
    choice = normalizers.get(name)
    z = rows(33, dtype=dtype)[[0, 1, 2, 4, 7, 8, 11]]
    dp = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

    def gradient(function, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x), x, dp.to(x.dtype))[0]

    exact = gradient(lambda x: choice.reference(x, None, choice.theta), z.double())
    same = gradient(lambda x: plain(choice, x), z.float() if dtype != torch.float64 else z).to(dtype)
    ours = gradient(lambda x: regard.normalize(x, name), z)
    from_rounded = 8 * torch.finfo(dtype).eps * dp.double().abs().amax() * max(1.0, float(exact.abs().amax()))
    assert float((ours.double() - exact).abs().max()) <= float(bound(exact, same, dtype) + from_rounded)


@pytest.mark.parametrize("name", NAMES)
def test_what_rows_sum_to(name):
    choice = normalizers.get(name)
    total = regard.normalize(rows(50), name).sum(-1)
    if choice.sums_to == "1":
        assert torch.allclose(total, torch.ones_like(total), atol=1e-12)
    elif name in ("softmax1", "softpick"):
        assert ((total >= 0) & (total <= 1 + 1e-12)).all()
        assert (total < 1 - 1e-6).any()
    elif name == "relu":
        has_positive = (rows(50) > 0).any(-1)
        assert torch.allclose(total, has_positive.double(), atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_scores_weigh_nothing(name):
    z = torch.randn(5, 9, dtype=torch.float64)
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[2] = False
    garbage = z.masked_fill(~mask, math.nan).requires_grad_()
    masked = regard.normalize(garbage, name, mask=mask)
    infinite = regard.normalize(z.masked_fill(~mask, -math.inf), name)
    assert torch.equal(masked, infinite)
    assert (masked[~mask] == 0).all() and (masked[2] == 0).all()
    grad = torch.autograd.grad(masked, garbage, torch.randn_like(masked))[0]
    assert (grad[~mask] == 0).all() and (grad[2] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_poisoned_row_is_nan_and_alone(name, bad):
    z = torch.randn(4, 6)
    clean = regard.normalize(z, name)
    z[2, 3] = bad
    p = regard.normalize(z, name)
    assert p[2].isnan().all()
    assert torch.equal(p[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("name", NAMES)
def test_ties_are_equal_to_the_bit(name):
    if normalizers.get(name).ordered:
        pytest.skip("keys of one score differ by their place")
    z = torch.randn(3, 40).round(decimals=0)
    p = regard.normalize(z, name)
    for row, weights in zip(z, p, strict=True):
        for value in row.unique():
            assert weights[row == value].unique().numel() == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 5), (1, 1)])
def test_empty_rows(name, shape):
    z = torch.zeros(shape, requires_grad=True)
    p = regard.normalize(z, name)
    assert p.shape == shape
    p.sum().backward()
    assert z.grad.shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_any_dim_and_any_strides(name):
    z = torch.randn(3, 4, 5, dtype=torch.float64)
    for dim in (0, 1, 2, -2):
        moved = regard.normalize(z.movedim(dim, -1).contiguous(), name).movedim(-1, dim)
        assert torch.equal(regard.normalize(z, name, dim=dim), moved)
    strided = torch.randn(6, 20, dtype=torch.float64)[::2, ::3]
    assert torch.equal(regard.normalize(strided, name), regard.normalize(strided.contiguous(), name))
    flipped = torch.randn(5, 4, dtype=torch.float64).T
    assert torch.equal(regard.normalize(flipped, name), regard.normalize(flipped.contiguous(), name))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_their_gradients(name):
    generator = torch.Generator().manual_seed(5)
    z = (2.0 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    t = torch.tensor([[0.7], [1.0], [1.9]], dtype=torch.float64, requires_grad=True)

    def function(z, t):
        return regard.normalize(z, name, temperature=t)

    assert torch.autograd.gradcheck(function, (z, t))
    assert torch.autograd.gradgradcheck(function, (z, t))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_jacobian_and_vjp_are_the_derivative(name, temperature):
    choice = normalizers.get(name)
    z = rows(8)[[0, 1, 3, 7, 8]]
    exact = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda s: choice.reference(s / temperature, None, choice.theta), row)
            for row in z
        ]
    )
    ours = regard.jacobian(z, name, temperature)
    assert torch.allclose(ours, exact, atol=1e-9)
    g = torch.randn(z.shape, dtype=torch.float64)
    assert torch.allclose(regard.vjp(z, g, name, temperature), torch.einsum("rij,ri->rj", exact, g), atol=1e-9)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", FUSED)
def test_torch_citizen(name):
    z = torch.randn(4, 9, requires_grad=True)
    spec = normalizers.get(name).spec
    torch.library.opcheck(torch.ops.regard.rows.default, (z, None, None, spec, 1.0, "cpu"))
    mask = torch.rand(4, 9) > 0.3
    torch.library.opcheck(torch.ops.regard.rows.default, (z, mask, None, spec, 0.5, "cpu"))
    compiled = torch.compile(lambda z: regard.normalize(z, name, temperature=0.8), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(z), regard.normalize(z, name, temperature=0.8))
    compiled(z).pow(2).sum().backward()
    ours, z.grad = z.grad, None
    regard.normalize(z, name, temperature=0.8).pow(2).sum().backward()
    assert torch.equal(ours, z.grad)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    z = torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.equal(torch.func.vmap(lambda x: regard.normalize(x, name))(z), regard.normalize(z, name))
