"""What keys get, by the Triton kernels under the interpreter, against the weights of the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import make

from regard import reference
from regard._backends.gpu.attention import key_reading
from regard._backends.gpu.attention import launch as attention

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


def check(problem, most=3):
    """Both readings of a problem against the reference's weights."""
    forward = attention.forward(problem)
    p = reference.weights_of_rows(problem, 0, problem.q.shape[2])
    received = key_reading.sum_over_queries(problem, forward)
    index, weight = key_reading.list_top_keys(problem, forward, most)
    bound = 4e-3 if problem.q.element_size() == 2 else 2e-5
    torch.testing.assert_close(received.double(), p.sum(2), rtol=bound, atol=bound)
    torch.testing.assert_close(weight.double(), p.topk(most).values, rtol=bound, atol=bound)
    assert torch.equal(index < 0, weight == 0)
    found = p.gather(3, index.long().clamp_min(0)).where(index >= 0, 0.0)
    torch.testing.assert_close(found, weight.double(), rtol=bound, atol=bound)
    ordered = index.sort(-1).values
    assert ((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0)).all()  # no key twice


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(map(str, options)))
def test_options(options):
    check(make(3, **SIZES | options))


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
    check(dataclasses.replace(problem, q=problem.q[:, :, 3:]), most=4)


def test_a_row_without_keys_and_a_row_of_nan():
    problem = make(7, **SIZES | dict(b=2), lengths=True)
    problem.key_lengths[0], problem.key_lengths[1] = 0, 37
    problem.q[1, 0, 4, 0] = math.nan
    forward = attention.forward(problem)
    index, weight = key_reading.list_top_keys(problem, forward, 3)
    assert (index[0] == -1).all() and (weight[0] == 0).all()
    assert (key_reading.sum_over_queries(problem, forward)[0] == 0).all()
    assert (index[1, 0, 4] == -1).all() and weight[1, 0, 4].isnan().all() and (index[1, 1] >= 0).all()
