"""What keys get, compiled on real shapes, against the weights of the float64 oracle on the same GPU."""

import dataclasses

import pytest
import torch
from attention_data import make

import regard
from regard import reference
from regard._backends.gpu.attention import key_reading
from regard._backends.gpu.attention import launch as attention

OPTIONS = [
    dict(causal=True, d=128, e=128),
    dict(left=300, right=0, sink=True),
    dict(mask=True, softcap=3.0),
    dict(lengths=True, temperature=True, d=80, e=80),
    dict(name="entmax15", causal=True),
    dict(name="sigmoid", d=256, e=256),
    dict(dtype=torch.float32, causal=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(map(str, options)))
def test_options(options):
    sizes = dict(b=2, h=4, g=2, m=700, n=900, d=64, e=64, dtype=torch.bfloat16, device="cuda", stats=())
    problem = make(3, **sizes | options)
    forward = attention.forward(problem)
    p = reference.weights_of_rows(problem, 0, 700)
    received = key_reading.sum_over_queries(problem, forward)
    index, weight = key_reading.list_top_keys(problem, forward, 8)
    torch.testing.assert_close(received.double(), p.sum(2), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(weight.double(), p.topk(8).values, rtol=2e-2, atol=4e-3)
    assert torch.equal(index < 0, ~(weight > 0))
    found = p.gather(3, index.long().clamp_min(0)).where(index >= 0, 0.0)
    torch.testing.assert_close(found, weight.double(), rtol=2e-2, atol=4e-3)
    again, _ = key_reading.list_top_keys(problem, forward, 8)
    assert torch.equal(index, again)


def test_rows_of_equal_scores_take_the_first_keys():
    problem = make(5, b=1, h=2, g=1, m=300, n=5000, d=64, e=64, dtype=torch.bfloat16, device="cuda", stats=())
    q = problem.q.clone()
    q[:, :, 100:164] = 0.0
    problem = dataclasses.replace(problem, q=q)
    index, weight = key_reading.list_top_keys(problem, attention.forward(problem), 8)
    assert (index[:, :, 100:164] == torch.arange(8, device="cuda")).all()
    torch.testing.assert_close(weight[:, :, 100:164], torch.full_like(weight[:, :, 100:164], 1 / 5000))


def test_through_the_public_call():
    q, k, v = (torch.randn(1, 4, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, stats = regard.attention(
        q, k, v, is_causal=True, return_stats=("entropy", "received", "top_keys(8)"), return_weights=[0, 2047]
    )
    want, p = regard.reference.attention(q, k, v, is_causal=True)
    assert (out.double() - want).abs().max() < 2e-2
    torch.testing.assert_close(stats.received.double(), p.sum(2), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(stats.weights.double(), p[:, :, [0, 2047]], rtol=1e-5, atol=1e-6)
    assert stats.top_keys.index.shape == (1, 4, 2048, 8) and stats.entropy.shape == (1, 4, 2048)
