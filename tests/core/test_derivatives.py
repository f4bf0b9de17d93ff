"""Derivatives of derivatives, and the transforms of torch.func: what the fused rows' own backward must not lose."""

import math

import pytest
import torch

import regard
from regard import normalizers

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
NAMES = [*normalizers.names(), "entmax(alpha=1.3)", "entmax(alpha=1.9)"]
ROW = torch.tensor([0.3, -1.2, 0.9, 0.25], dtype=torch.float64)
OUT = torch.tensor([0.3, 0.5, 0.8, 1.0], dtype=torch.float64)
ALONG = torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64)


def taylor(f, z: torch.Tensor, orders: int) -> list[float]:
    """dᵏ/dhᵏ OUT·f(z + h·ALONG) at h = 0 for k = 1 … orders, by nested gradients."""
    z = z.clone().requires_grad_()
    y, found = (f(z) * OUT).sum(), []
    for _ in range(orders):
        (slope,) = torch.autograd.grad(y, z, create_graph=True)
        y = (slope * ALONG).sum()
        found.append(y.item())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_four_derivatives_are_those_of_the_reference_by_differences(name):
    ours = taylor(lambda z: regard.normalize(z, name), ROW, 4)
    h = torch.linspace(-0.02, 0.02, 9, dtype=torch.float64)[:, None]
    along = (regard.normalize(ROW + h * ALONG, name, backend="reference") * OUT).sum(-1)
    powers = (h / 0.02) ** torch.arange(9, dtype=torch.float64)  # an interpolating polynomial in h / 0.02
    series = torch.linalg.solve(powers, along)
    for order, tolerance in zip((1, 2, 3, 4), (1e-9, 1e-7, 1e-4, 1e-2), strict=True):
        theirs = series[order].item() * [1, 2, 6, 24][order - 1] / 0.02**order
        assert abs(ours[order - 1] - theirs) <= tolerance * max(1.0, abs(theirs)), order


@pytest.mark.parametrize("name", NAMES)
def test_hessian_vector_products_by_the_double_backward_trick(name):
    loss = lambda z: (regard.normalize(z, name) * OUT).sum()  # noqa: E731
    hessian = torch.autograd.functional.hessian(loss, ROW)
    assert name in ("sparsemax",) or hessian.abs().max() > 1e-2
    torch.testing.assert_close(torch.autograd.functional.hvp(loss, ROW, ALONG)[1], hessian @ ALONG)
    torch.testing.assert_close(torch.autograd.functional.vhp(loss, ROW, ALONG)[1], ALONG @ hessian)


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_one_level_agree_with_autograd(name):
    f = lambda z: regard.normalize(z, name)  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(f, ROW)
    torch.testing.assert_close(torch.func.grad(lambda z: f(z)[0])(ROW), jacobian[0])
    torch.testing.assert_close(torch.func.jacrev(f)(ROW), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(f)(ROW), jacobian)
    torch.testing.assert_close(torch.func.vjp(f, ROW)[1](OUT)[0], OUT @ jacobian)


@pytest.mark.parametrize("argument", ["temperature", "alpha", "bias"])
def test_transforms_over_the_other_arguments(argument):
    f = {
        "temperature": lambda x: regard.softmax(ROW, temperature=x),
        "alpha": lambda x: regard.entmax(ROW, x),
        "bias": lambda x: regard.sigmoid_norm(ROW, bias=x),
    }[argument]
    at, step = torch.tensor([1.4], dtype=torch.float64), 1e-5
    column = (f(at + step) - f(at - step)) / (2 * step)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(f)(at)[:, 0], column, atol=1e-8, rtol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(at, torch.ones_like(at)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, column, atol=1e-8, rtol=1e-7)
    hessian = torch.func.hessian(lambda x: (f(x) * OUT).sum())(at)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda x: (f(x) * OUT).sum(), at))


def test_a_parameter_that_requires_grad_inside_a_transform_that_does_not_know_it():
    alpha = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    slope = torch.func.grad(lambda x: (x * regard.entmax(ROW, alpha)).sum())(torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(slope, regard.entmax15(ROW))


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-12, 1 + 1.2e-7, 1 + 1e-5, 1.0009, 1.02, 1.06])
def test_alpha_next_to_one_has_its_slopes(alpha):
    at = torch.tensor([alpha], dtype=torch.float64)
    far = torch.linspace(1.0, 1.1, 8, dtype=torch.float64)
    weights = torch.stack([regard.entmax(ROW, a.item()) for a in far]) @ OUT
    series = torch.linalg.solve((far[:, None] - at) ** torch.arange(8), weights)  # around alpha, from values elsewhere
    loss = lambda z, a: (regard.entmax(z, a) * OUT).sum()  # noqa: E731
    slope = torch.autograd.functional.jacobian(lambda a: loss(ROW, a), at)
    hessian = torch.autograd.functional.hessian(loss, (ROW, at))
    assert abs(slope.item() - series[1].item()) < 1e-7
    assert abs(hessian[1][1].item() - 2 * series[2].item()) < 1e-5
    step = 1e-5
    across = [(loss(ROW + step * e, at) - loss(ROW - step * e, at)) / (2 * step) for e in torch.eye(4).double()]
    noise = dict(rtol=1e-5, atol=1e-15 / max(alpha - 1.0, 1e-8) / step + 1e-7)  # of the differences: τ rounds
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(lambda z: loss(z, at), ROW), torch.stack(across), **noise
    )
    torch.testing.assert_close(hessian[0][1][:, 0], torch.func.jacfwd(torch.func.grad(loss), 1)(ROW, at)[:, 0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss, 1), (None, 0))(ROW, at[None])[0], slope)
    single = torch.autograd.functional.jacobian(lambda a: loss(ROW.float(), a), at.float())
    assert abs(single.item() - slope.item()) < 1e-5


@pytest.mark.parametrize("alpha", [1.05, 1.12, 1.2, 1.5])
def test_alpha_learns_from_weights_rounded_to_bfloat16(alpha):
    draw = torch.Generator().manual_seed(3)
    z, g = (torch.randn(8, 200, generator=draw).bfloat16() for _ in range(2))
    slopes = []
    for dtype in (torch.bfloat16, torch.float64):
        a = torch.full((8, 1), alpha, dtype=torch.float64, requires_grad=True)
        slopes += torch.autograd.grad(regard.entmax(2 * z.to(dtype), a), a, g.to(dtype))
    assert (slopes[0] - slopes[1]).abs().max() < 0.02 * slopes[1].square().mean().sqrt()


@pytest.mark.parametrize("alpha", [1 + 1e-12, 1.000001, 1.0001, 1.05, 1.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_vjp_takes_the_care_that_normalize_takes(alpha, dtype):
    draw = torch.Generator().manual_seed(5)
    z, g = (torch.randn(4, 50, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    name, exact = f"entmax(alpha={alpha!r})", (2 * z).double().requires_grad_()
    (want,) = torch.autograd.grad(regard.normalize(exact, name, backend="reference"), exact, g.double())
    exactly = max(1e-11, 1e-15 / max(alpha - 1.0, 1e-8))  # the root magnifies the rounding of τ
    tolerance = {torch.float64: exactly, torch.float32: 2e-6}.get(dtype, 16 * torch.finfo(dtype).eps)
    for backend in (None, "reference"):
        got = regard.vjp(2 * z, g, name, backend=backend)
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max(), backend
    if dtype == torch.float64:
        dense = torch.einsum("rij,ri->rj", regard.jacobian(2 * z, name), g)
        assert (dense - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_backward_of_short_tensors_cancels_in_long_ones(dtype):
    draw = torch.Generator().manual_seed(7)
    p = torch.softmax(3 * torch.randn(8, 300, generator=draw), -1).to(dtype)
    g = (100 + torch.randn(8, 300, generator=draw)).to(dtype)  # what is common to all entries has no say
    exact = p.double() * (g.double() - (p.double() * g.double()).sum(-1, keepdim=True))
    ours = regard.softmax_backward(g, p)
    assert ours.dtype == dtype and (ours - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()


def test_vjp_takes_a_gradient_that_the_scores_dtype_cannot_hold():
    for name, temperature in (("softmax", 1.0), ("entmax15", 1.0), ("entmax(alpha=1.9)", 1.0), ("softmax", math.inf)):
        z, g = torch.tensor([0.0, 0.5, 0.0, 0.25]).half(), torch.tensor([8e4, 0.0, 0.0, 0.0])
        want = regard.vjp(z.double(), g.double(), name, temperature)
        assert torch.allclose(regard.vjp(z, g, name, temperature).double(), want, rtol=1e-3), name


@pytest.mark.parametrize("name", ["softmax", "entmax(alpha=1.0001)", "entmax(alpha=1.5)", "entmax(alpha=1.9)"])
def test_vjp_of_a_row_with_nan_is_nan(name):
    z = torch.tensor([[1.0, torch.nan], [1.0, 0.9]])
    for backend in (None, "reference"):
        ds = regard.vjp(z, torch.tensor([[1.0, 2.0], [1.0, 2.0]]), name, backend=backend)
        assert ds[0].isnan().all() and ds[1].isfinite().all()
    assert regard.jacobian(z, name)[0].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_row_with_nan_is_nan(name):
    start = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, 1.0, 2.0], [1.0, 0.9, -torch.inf]])
    for backend in (None, "reference"):
        z = start.clone().requires_grad_()
        (ds,) = torch.autograd.grad(regard.normalize(z, name, temperature=0.7, backend=backend).square().sum(), z)
        assert ds[:2].isnan().all() and ds[2].isfinite().all(), backend


@pytest.mark.parametrize("name", normalizers.names())
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_jacobian_of_large_scores_does_not_round_by_their_size(name, temperature):
    above = temperature * torch.tensor([0.0, -1.5, 2.0, 0.25], dtype=torch.float64)
    z = 2.0**40 + above
    here = z - z[2]  # exact; beside 2⁴⁰ softmax1 and softpick are softmax, and sigmoid is 1
    alike = {"softmax1": "softmax", "softpick": "softmax"}.get(name, name)
    if name == "relu":
        want = (torch.eye(4, dtype=torch.float64) - (z / z.sum())[:, None]) / z.sum()
    elif name in ("sigmoid", "stickbreaking"):
        want = torch.zeros(4, 4, dtype=torch.float64)
    else:
        want = regard.jacobian(here, alike, temperature)
    torch.testing.assert_close(regard.jacobian(z, name, temperature), want, rtol=1e-12, atol=1e-15 * want.abs().max())


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "entmax15", "relu"])
def test_the_jacobian_of_a_sick_row_says_nan(name):
    z = torch.tensor([[math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0], [1.0, 2.0, 3.0]])
    whole = regard.jacobian(z, name)
    assert whole[:2].isnan().all() and whole[2].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_vjp_is_carried_through_transforms(name):
    def ours(z):
        return regard.vjp(z, OUT, name)

    def exact(z):
        return torch.func.vjp(lambda x: regard.normalize(x, name, backend="reference"), z)[1](OUT)[0]

    for transform in (
        lambda f: torch.func.jvp(f, (ROW,), (ALONG,))[1],
        lambda f: torch.func.grad(lambda z: (f(z) * ALONG).sum())(ROW),
        lambda f: torch.func.jacrev(f)(ROW),
    ):
        torch.testing.assert_close(transform(ours), transform(exact))
    tangent = torch.func.jvp(lambda g: regard.vjp(ROW, g, name), (OUT,), (ALONG,))[1]
    torch.testing.assert_close(tangent, regard.vjp(ROW, ALONG, name))
