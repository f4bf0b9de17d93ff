"""Parameters of normalisers per head and per row, compiled, against the float64 oracle on the same GPU."""

from __future__ import annotations

import pytest
import torch
from attention_data import Poisoned, check_backward, check_forward, make

import regard
from regard import normalizers
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.sparse import launch as sparse

pytestmark = pytest.mark.filterwarnings("default")
SIZES = dict(b=2, h=4, g=2, m=600, n=600, dtype=torch.bfloat16, device="cuda")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(attention, "torch", Poisoned())
    monkeypatch.setattr(sparse, "torch", Poisoned())


def check(problem):
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("theta", ["head", "row"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
def test_sweeps(name, d, theta):
    check(make(1, name, d=d, e=d, causal=True, theta=theta, **SIZES))


@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
def test_beside_other_options(name):
    check(make(2, name, d=64, e=64, theta="row", mask=True, temperature=True, **SIZES))


@pytest.mark.parametrize("theta", ["head", "row"])
def test_candidate_lists(theta, monkeypatch):
    monkeypatch.setattr(sparse, "LEAST_KEYS", dict.fromkeys(sparse.LEAST_KEYS, 256))
    problem = make(3, "entmax", d=128, e=128, causal=True, theta=theta, **SIZES | dict(b=1, m=1100, n=1100))
    assert sparse.supports(problem, "forward") is None and sparse.supports(problem, "backward") is None
    check(problem)


def test_float32():
    check(make(4, "entmax", d=64, e=64, theta="head", **SIZES | dict(dtype=torch.float32, m=200, n=200)))


def test_decode():
    problem = make(5, "sigmoid", d=64, e=64, theta="head", **SIZES | dict(m=1, n=4096), stats=())
    check_forward(attention, problem, slack=2.0)


def test_outside_the_kernels_range_is_nan():
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    alpha = torch.tensor([1.5, 3.0], device="cuda")
    out = regard.attention(q, k, v, normalizer=normalizers.get("entmax", alpha=alpha))
    assert out[:, 0].isfinite().all() and out[:, 1].isnan().all()


def test_learned_alpha_trains():
    torch.manual_seed(0)
    layer = regard.nn.MultiheadAttention(256, 4, normalizer="entmax(alpha=learned)", temperature="asentmax").cuda()
    x = torch.randn(2, 300, 256, device="cuda")
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (layer(x, is_causal=True) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] and (layer.parameter.value != 1.5).all()
