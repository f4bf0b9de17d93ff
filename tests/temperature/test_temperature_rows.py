"""Rows at every temperature: extreme numbers, tensors, limits, and what weighs nothing, against float64."""

import math

import numpy as np
import pytest
import torch

import regard
from regard import normalizers

inf = math.inf
NAMES = normalizers.names()


def exact(z, name, t):
    choice = normalizers.get(name)
    return choice.reference(z.double() / t, None, choice.theta)


@pytest.mark.parametrize("name", [*NAMES])
def test_gradient_of_a_temperature_beside_scores_that_weigh_nothing(name):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(3, 6, generator=generator)
    mask = torch.tensor([True, False, True, True, False, True])
    dirty = z.masked_fill(~mask, math.nan)
    dirty[:, 1] = inf
    dirty[0, 2] = -inf
    t = torch.tensor([[0.5], [1.5], [3.0]], requires_grad=True)
    weights = torch.randn(3, 6, generator=generator)
    (regard.normalize(dirty, name, temperature=t, mask=mask) * weights).sum().backward()
    wide = t.detach().double().requires_grad_()
    choice = normalizers.get(name)
    seen = mask & (dirty > -inf)
    p = choice.reference(z.double().masked_fill(~seen, 0.0) / wide, seen, choice.theta)
    (p * weights).sum().backward()
    assert torch.allclose(t.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_temperatures(name, kind):
    z = torch.tensor([[-inf, 1.0, 2.0, -3.0]])
    for t in (1e-20, 1e-15) if name == "softpick" else (1e-20, 1e-15, 1e15, 1e20):  # exp(s) − 1 cancels near 0
        p = regard.normalize(z, name, temperature=kind(t))
        limit = regard.normalize(z, name, temperature=0.0 if t < 1 else inf)
        assert torch.allclose(p, limit, atol=1e-6), (t, p, limit)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_are_not_rounded_by_a_tensor_temperature(name):
    z = torch.tensor([[1e8, 1e8 + 8, 1e8 - 16]])
    p = regard.normalize(z, name, temperature=torch.tensor([[3.0]]))
    assert torch.allclose(p.double(), exact(z, name, 3.0), atol=1e-6)


def test_relu_knows_no_temperature():
    z = torch.tensor([1e-30, 3e-30, -1.0], requires_grad=True)
    right = torch.tensor([0.25, 0.75, 0.0])
    for t in (0.0, 1e-15, 1e15, inf):
        t = torch.tensor([t], dtype=torch.float64, requires_grad=True)
        for given in (float(t.detach()), t):
            p = regard.relu_norm(z, temperature=given)
            assert torch.allclose(p, right)
            slope = torch.autograd.grad(p[0], z, retain_graph=True)[0]
            assert torch.allclose(slope[:2], torch.tensor([0.1875e30, -0.0625e30]))
        assert torch.autograd.grad(p[0], t)[0] == 0


@pytest.mark.parametrize("t", [0.0, inf, torch.tensor([0.0]), torch.tensor([inf])], ids=str)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "sigmoid", "softmax1"])
def test_limits_keep_a_graph_with_gradient_zero(name, t):
    z = torch.tensor([0.5, -inf, 1.0], requires_grad=True)
    regard.normalize(z, name, temperature=t)[2].backward()
    assert torch.equal(z.grad, torch.zeros(3))


@pytest.mark.parametrize("t", [inf, torch.tensor([inf])], ids=["number", "tensor"])
def test_softpick_moves_at_its_hot_limit(t):
    z = torch.tensor([-1.0, 1.0, 2.0], requires_grad=True)
    regard.softpick(z, temperature=t)[1].backward()
    assert torch.allclose(z.grad, torch.tensor([0.0625, 0.1875, -0.0625]))
    assert torch.allclose(regard.jacobian(z, "softpick", inf)[1], z.grad)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_at_extreme_temperatures(name):
    generator = torch.Generator().manual_seed(3)
    z, grad = torch.randn(2, 4, 5, generator=generator)
    for t in (0.0, 1e-15, 0.3, 1e15, inf):
        if name == "softpick" and t == 1e15:  # exp(s) − 1 cancels near 0
            continue
        dense = regard.jacobian(z, name, t)
        right = (dense.mT @ grad[..., None])[..., 0]
        assert dense.isfinite().all() and torch.allclose(regard.vjp(z, grad, name, t), right, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "entmax(alpha=1.7)"])
def test_jacobian_subtracts_before_it_divides(name):
    z = 1e12 + torch.tensor([0.0, 0.125, -0.0625, -0.25], dtype=torch.float64)
    assert torch.allclose(regard.jacobian(z, name, 0.1), regard.jacobian(z - 1e12, name, 0.1), atol=1e-12)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_log_softmax_subtracts_before_it_divides(kind):
    for z, t in (([1e8 + 8, 1e8], 0.3), ([1e8, 1e8 - 16, -inf], 1.7), ([3.0, -2.0], 1e-15)):
        z = torch.tensor(z)
        right = torch.log_softmax((z.double() - z.double().max()) / t, -1)
        assert torch.allclose(regard.log_softmax(z, temperature=kind(t)).double(), right, atol=1e-6)
    half = torch.tensor([40000.0, 39968.0], dtype=torch.float16)
    assert torch.equal(regard.log_softmax(half, temperature=kind(0.5)), torch.tensor([0.0, -64.0]).half())
    for t in (0.0, inf):
        with pytest.raises(ValueError, match="temperature must be positive and finite here"):
            regard.log_softmax(torch.zeros(3), temperature=kind(t))


@pytest.mark.parametrize("t", [1.0, 0.5])
@pytest.mark.parametrize("kind", [float, lambda t: torch.full((2, 1), t)])
def test_the_logarithm_of_no_weight_is_minus_infinity_at_every_temperature(kind, t):
    z = torch.tensor([[-inf, -inf], [0.0, 0.0]], requires_grad=True)
    log_p = regard.log_softmax(z, temperature=kind(t))
    assert torch.equal(log_p, regard.softmax(z.detach(), temperature=kind(t)).log())
    assert torch.equal(torch.autograd.grad(log_p.sum(), z)[0], torch.zeros(2, 2))
    lse = regard.logsumexp(z, temperature=kind(t))
    assert torch.allclose(lse, torch.tensor([-inf, math.log(2.0)]))
    assert torch.allclose(torch.autograd.grad(lse.sum(), z)[0], torch.tensor([[0.0], [0.5 / t]]).expand(2, 2))


@pytest.mark.parametrize("function", [regard.log_softmax, regard.logsumexp])
def test_logarithms_give_temperature_its_gradient(function):
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    t = (torch.rand(3, 1, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, t: function(z, -1, t), (z, t))
    assert torch.autograd.gradcheck(lambda z, t: function(z.mT, 0, t.mT), (z, t))
    beside = torch.cat([z.detach(), torch.full((3, 1), -inf)], -1)
    alone, joined = (torch.autograd.grad(function(x, -1, t)[..., :3].sum(), t)[0] for x in (z.detach(), beside))
    assert torch.allclose(alone, joined)


@pytest.mark.parametrize("t", [0.0, inf, torch.tensor([0.0]), torch.tensor([inf])], ids=str)
def test_logsumexp_has_no_limit(t):
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        regard.logsumexp(torch.ones(3), temperature=t)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_a_temperature_for_no_rows(shape):
    z, t = torch.empty(shape, requires_grad=True), torch.ones(shape[0], 1, requires_grad=True)
    for name in NAMES:
        assert regard.normalize(z, name, temperature=t).shape == shape
    assert regard.log_softmax(z, -1, t).shape == shape and regard.logsumexp(z, -1, t).shape == shape[:1]


def test_refused_by_name():
    z = torch.ones(2, 4)
    far = torch.ones(2, 1, device="meta")
    for call, kind, words in (
        (lambda: regard.softmax(z, mask=far.bool()), ValueError, "mask must be on the scores' device cpu"),
        (lambda: regard.softmax(z, temperature=far), ValueError, "temperature must be on the scores' device"),
        (lambda: regard.entmax(z, far), ValueError, "alpha must be on the scores' device"),
        (lambda: regard.sigmoid_norm(z, bias=far), ValueError, "bias must be on the scores' device"),
        (lambda: regard.softmax_backward(z, z.to("meta")), ValueError, "grad_output must be on"),
        (lambda: regard.vjp(z, z.to("meta")), ValueError, "grad must be on"),
        (lambda: regard.softmax(z, temperature=10**400), ValueError, "temperature must be 0, inf or between 1e-20 and"),
        (lambda: regard.log_softmax(z, temperature=np.ones(2)), TypeError, "temperature must be a number or a tensor"),
        (lambda: regard.softmax(z, mask=(z > 0).to_sparse()), TypeError, "mask must be a dense tensor"),
        (lambda: regard.gumbel_softmax(z, generator=3), TypeError, "generator must be a torch.Generator"),
        (lambda: normalizers.get("entmax(alpha=1_5)"), ValueError, "alpha must be a number, got '1_5'"),
    ):
        with pytest.raises(kind, match=words):
            call()
    with pytest.raises(TypeError, match="scores must be a dense tensor, got a nested one"):
        regard.normalize(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


@pytest.mark.parametrize("name", NAMES)
def test_scores_on_meta_have_a_shape(name):
    p = regard.normalize(torch.empty(2, 3, device="meta"), name, temperature=0.5)
    assert p.shape == (2, 3) and p.device.type == "meta"
