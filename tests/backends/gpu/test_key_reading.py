"""What keys get, by the Triton kernels under the interpreter, against the weights of the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import make
from key_data import check_keys

import regard
from regard._backends.gpu.attention import key_reading
from regard._backends.gpu.attention import launch as attention
from regard._core import key_reading as core
from regard._core import plans

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = dict(b=1, h=2, g=1, m=19, n=37, d=16, e=16, stats=(), device=DEVICE)
OPTIONS = [
    dict(causal=True),
    dict(left=9, right=3, sink=True),
    dict(mask=True, softcap=3.0),
    dict(lengths=True, b=2, temperature=True),
    dict(name="entmax15"),
    dict(name="sigmoid", causal=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(map(str, options)))
def test_options(options):
    check_keys(make(3, **SIZES | options), 3)


def test_rows_of_equal_scores_take_the_first_keys():
    """More keys at the bound than a list holds: all scores are equal in one row, and few differ in another."""
    problem = make(5, **SIZES | dict(n=70, h=1))
    q = problem.q.clone()
    q[0, 0, 2] = 0.0
    problem = dataclasses.replace(problem, q=q)
    forward = attention.forward(problem)
    index, weight = key_reading.list_top_keys(problem, forward, 4)
    assert index[0, 0, 2].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(weight[0, 0, 2], torch.full((4,), 1 / 70, device=DEVICE))
    check_keys(dataclasses.replace(problem, q=problem.q[:, :, 3:]), 4)


def test_a_row_without_keys_and_a_row_of_nan():
    problem = make(7, **SIZES | dict(b=2), lengths=True)
    problem.key_lengths[0], problem.key_lengths[1] = 0, 37
    problem.q[1, 0, 4, 0] = math.nan
    forward = attention.forward(problem)
    index, weight = key_reading.list_top_keys(problem, forward, 3)
    assert (index[0] == -1).all() and (weight[0] == 0).all()
    assert (key_reading.sum_over_queries(problem, forward)[0] == 0).all()
    assert (index[1, 0, 4] == -1).all() and weight[1, 0, 4].isnan().all() and (index[1, 1] >= 0).all()


def test_calls_of_one_kind_share_a_plan(monkeypatch):
    monkeypatch.setattr(core, "is_fused", lambda *_: True)
    monkeypatch.setattr(plans, "plans", {})
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, heads, 9, 8, device=DEVICE, requires_grad=seed == 2) for heads in (2, 1, 1))
        wanted = dict(is_causal=True, enable_gqa=True)
        out, stats = regard.attention(q, k, v, **wanted, return_stats=("entropy", "received", "top_keys(2)"))
        want, p = regard.reference.attention(q.double(), k.double(), v.double(), **wanted)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stats.received.double(), p.sum(2), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stats.top_keys.weight.double(), p.topk(2).values, rtol=1e-5, atol=1e-5)
        entropy = regard.statistics.of_weights(p).entropy
        torch.testing.assert_close(stats.entropy.double(), entropy.double(), rtol=1e-4, atol=1e-4)
        assert out.requires_grad is (seed == 2) and len(plans.plans) == 1
