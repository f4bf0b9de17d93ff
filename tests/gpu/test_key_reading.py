"""What keys get, compiled on real shapes, against the weights of the float64 oracle on the same GPU."""

import dataclasses

import pytest
import torch
from attention_data import make
from key_data import check_keys

import regard
from regard._backends.gpu.attention import key_reading
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.sparse import launch as sparse

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
    index, _ = check_keys(problem, 8, 2e-2, 4e-3)
    again, _ = key_reading.list_top_keys(problem, attention.forward(problem), 8)
    assert torch.equal(index, again)


@pytest.mark.parametrize("most", [1, 8, 32])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
def test_lists_of_other_widths(d, most):
    problem = make(
        4, b=1, h=4, g=2, m=1500, n=1500, d=d, e=d, dtype=torch.bfloat16, device="cuda", causal=True, stats=()
    )
    assert sparse.supports(problem, "top keys") is None
    check_keys(dataclasses.replace(problem, q=2 * problem.q), most, 2e-2, 4e-3)


def test_rows_of_equal_scores_take_the_first_keys():
    problem = make(5, b=1, h=2, g=1, m=300, n=5000, d=64, e=64, dtype=torch.bfloat16, device="cuda", stats=())
    q = problem.q.clone()
    q[:, :, 100:164] = 0.0
    problem = dataclasses.replace(problem, q=q)
    index, weight = key_reading.list_top_keys(problem, attention.forward(problem), 8)
    assert (index[:, :, 100:164] == torch.arange(8, device="cuda")).all()
    torch.testing.assert_close(weight[:, :, 100:164], torch.full_like(weight[:, :, 100:164], 1 / 5000))
    check_keys(problem, 8, 2e-2, 4e-3)  # their neighbours are right as well


@pytest.mark.parametrize("call", range(3))  # computed, recorded, replayed
def test_through_the_public_call(call):
    torch.manual_seed(call)
    q, k, v = (torch.randn(1, 4, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanted = dict(return_stats=("entropy", "received", "top_keys(8)"), return_weights=[0, 2047])
    for _ in range(call):
        regard.attention(2 * q, k, v, is_causal=True, **wanted)
    out, stats = regard.attention(q, k, v, is_causal=True, **wanted)
    want, p = regard.reference.attention(q, k, v, is_causal=True)
    assert (out.double() - want).abs().max() < 2e-2
    torch.testing.assert_close(stats.received.double(), p.sum(2), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(stats.weights.double(), p[:, :, [0, 2047]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.top_keys.weight.double(), p.topk(8).values, rtol=2e-2, atol=4e-3)
    assert stats.top_keys.index.shape == (1, 4, 2048, 8) and stats.entropy.shape == (1, 4, 2048)
