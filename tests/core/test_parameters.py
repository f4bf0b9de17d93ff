"""Parameters of normalisers as tensors: values, gradients, shapes, refusals, and the names that stand for them."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard import normalizers

VALUES = {"entmax": (1.2, 1.5, 1.9), "sigmoid": (-2.0, 0.0, 0.7)}
NAMES = [name for name in normalizers.names() if normalizers.get(name).parameter_slope is not None]


def choose(name, value):
    return normalizers.get(name, **{normalizers.get(name).parameter.name: value})


def inputs(batch=2, heads=3, queries=7, keys=9, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, 4), (batch, heads, keys, 4), (batch, heads, keys, 5)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def test_every_learnable_normaliser_is_here():
    assert sorted(NAMES) == sorted(VALUES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, dict(is_causal=True, temperature=0.5), dict(key_lengths=[0, 6])])
def test_each_head_has_its_parameter(name, options):
    q, k, v = inputs()
    tensor = torch.tensor(VALUES[name], dtype=torch.float64)
    out, stats = regard.attention(q, k, v, normalizer=choose(name, tensor), return_stats=True, **options)
    for head, value in enumerate(VALUES[name]):
        one = slice(head, head + 1)
        alone, own = regard.attention(
            q[:, one], k[:, one], v[:, one], normalizer=choose(name, value), return_stats=True, **options
        )
        torch.testing.assert_close(out[:, one], alone)
        for statistic in own:
            torch.testing.assert_close(stats[statistic][:, one], own[statistic])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_agree_with_finite_differences(name, backend):
    q, k, v = inputs()
    theta = torch.tensor(VALUES[name], dtype=torch.float64, requires_grad=True)
    warmth = torch.tensor([0.7, 1.0, 1.5], dtype=torch.float64, requires_grad=True)  # one per head too

    def call(q, k, v, theta, warmth):
        given = dict(normalizer=choose(name, theta), temperature=warmth, is_causal=True, backend=backend)
        return regard.attention(q, k, v, **given)

    assert torch.autograd.gradcheck(call, (q, k, v, theta, warmth), fast_mode=backend == "reference")


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name):
    q, k, v = inputs(batch=1, queries=3, keys=4)
    theta = torch.tensor(VALUES[name], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda q, theta: regard.attention(q, k, v, normalizer=choose(name, theta)), (q, theta)
    )


@pytest.mark.parametrize("alpha", [1.005, 1.01, 1.1, 1.5, 2.0])
def test_alpha_gradient_up_to_the_ends_of_the_kernels_range(alpha):
    q, k, v = inputs(keys=40)
    grads = []
    for backend in ("cpu", "reference"):
        theta = torch.full((3,), alpha, dtype=torch.float64, requires_grad=True)
        out = regard.attention(q, k, v, normalizer=choose("entmax", theta), backend=backend)
        grads += torch.autograd.grad(out.square().sum(), theta)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_types(name, dtype):
    q, k, v = inputs(keys=70, dtype=dtype)
    found = []
    for cast in (dtype, torch.float64):
        theta = torch.tensor(VALUES[name], requires_grad=True)
        given = (x.detach().to(cast) for x in (q, k, v))
        out = regard.attention(*given, normalizer=choose(name, theta), is_causal=True)
        found.append((out.double(), *torch.autograd.grad(out.double().square().sum(), theta)))
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, truth in zip(*found, strict=True):
        assert (ours - truth).norm() <= rounding * (truth.norm() + 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name):
    q, k, v = inputs()
    value = VALUES[name][0]
    whole = regard.attention(q, k, v, normalizer=choose(name, value))
    for shape in ((), (3,), (3, 1, 1), (2, 3, 7), (2, 3, 7, 1), (2, 1, 7, 1), (7, 1)):
        out = regard.attention(q, k, v, normalizer=choose(name, torch.full(shape, value, dtype=q.dtype)))
        torch.testing.assert_close(out, whole)
    with pytest.raises(ValueError, match=r"must have shape \(3,\), \(2, 3, 7\) or broadcast to \(2, 3, 7, 1\)"):
        regard.attention(q, k, v, normalizer=choose(name, torch.full((2,), value)))


def test_sink_and_temperature_per_head_have_gradients():
    q, k, v = inputs()
    sink, warmth = (torch.tensor(x, dtype=torch.float64).requires_grad_() for x in ([0.1, -1.0, 2.0], [0.5, 1.0, 2.0]))
    assert regard.attention_path(q, k, v, sink=sink, temperature=warmth).backend == "cpu"
    assert torch.autograd.gradcheck(lambda s, t: regard.attention(q, k, v, sink=s, temperature=t), (sink, warmth))


@pytest.mark.parametrize("name", NAMES)
def test_rows(name):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    theta = torch.tensor(VALUES[name], dtype=torch.float64)[:, None].requires_grad_()
    out = regard.normalize(z, choose(name, theta))
    for row, value in enumerate(VALUES[name]):
        torch.testing.assert_close(out[row], regard.normalize(z[row], choose(name, value)))
    assert torch.autograd.gradcheck(lambda z, theta: regard.normalize(z, choose(name, theta)), (z, theta))


def test_outside_the_kernels_range_the_reference_computes():
    q, k, v = inputs()
    choice = choose("entmax", torch.tensor([1.0, 1.5, 1.002], dtype=torch.float64))
    path = regard.attention_path(q, k, v, normalizer=choice)
    assert path.backend == "reference" and "alpha outside [1.005, 2]" in path.reason
    torch.testing.assert_close(
        regard.attention(q, k, v, normalizer=choice)[:, 0], regard.attention(q[:, :1], k[:, :1], v[:, :1])[:, 0]
    )
    with pytest.raises(ValueError, match="backend 'cpu' cannot compute this call: alpha outside"):
        regard.attention(q, k, v, normalizer=choice, backend="cpu")
    with pytest.raises(ValueError, match=r"alpha must lie in \[1, 32\]"):
        regard.attention(q, k, v, normalizer=choose("entmax", torch.tensor([0.5, 1.5, 2.0])))


def test_what_cannot_be_read_and_lies_outside_is_nan():
    q, k, v = inputs(dtype=torch.float32)

    def call(alpha):
        return regard.attention(q, k, v, normalizer=choose("entmax", alpha))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    alpha = torch.tensor([1.25, 1.5, 3.0])
    out = compiled(alpha)
    torch.testing.assert_close(out[:, :2], call(torch.tensor([1.25, 1.5, 1.5]))[:, :2])
    assert out[:, 2].isnan().all()


def test_bias_by_the_number_of_keys():
    q, k, v = inputs(queries=9)
    counts = torch.arange(1.0, 10.0, dtype=torch.float64)
    by_name = regard.attention(q, k, v, is_causal=True, normalizer="sigmoid(bias=-log(n))")
    by_hand = regard.attention(q, k, v, is_causal=True, normalizer=choose("sigmoid", -counts.log()[:, None]))
    torch.testing.assert_close(by_name, by_hand)
    z = torch.zeros(2, 4).index_fill(1, torch.tensor([3]), -math.inf)
    torch.testing.assert_close(
        regard.normalize(z, "sigmoid(bias=-log(n))"), torch.tensor([[0.25, 0.25, 0.25, 0.0]] * 2)
    )
    assert normalizers.get("sigmoid(bias=-log(n))").spec == "sigmoid(bias=-log(n))"


def test_refusals():
    with pytest.raises(TypeError, match="normalizer 'entmax' takes 'alpha', got 'beta'"):
        normalizers.get("entmax", beta=1.0)
    with pytest.raises(TypeError, match="normalizer 'softmax' takes no parameter"):
        normalizers.get("softmax", alpha=1.0)
    with pytest.raises(TypeError, match="alpha must be a number, a tensor or a function"):
        normalizers.get("entmax", alpha="1.5")
    with pytest.raises(ValueError, match=r"must be a number, got 'learned'; regard\.nn"):
        normalizers.get("entmax(alpha=learned)")
    with pytest.raises(ValueError, match=r"regard\.using takes a number for alpha"):
        regard.using(torch.nn.Linear(2, 2), normalizer=choose("entmax", torch.ones(2)))
    with pytest.raises(TypeError, match="its parameter must be a number here"):
        regard.jacobian(torch.zeros(3), choose("entmax", torch.ones(1)))
