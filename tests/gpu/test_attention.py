"""The attention kernels compiled, on shapes that fill several blocks, against the float64 oracle on the same GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_data import FUSED, Poisoned, check_backward, check_forward, make, random_problem

import regard
from regard import reference, statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.backward import cudnn
from regard._call.problem import Upstream

pytestmark = pytest.mark.filterwarnings("default")
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(attention, "torch", Poisoned())


def check(problem, **slack):
    check_backward(attention, problem, check_forward(attention, problem, **slack), **slack)


@pytest.mark.parametrize("seed", range(100, 124))
def test_any_options(seed):
    dtype = (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
    check(random_problem(seed, dtype, "cuda", size=5), slack=2.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", FUSED)
def test_model_shapes(name, d, causal):
    check(make(1, name, b=1, m=600, n=600, d=d, e=d, dtype=torch.bfloat16, device="cuda", causal=causal), slack=2.0)


@pytest.mark.parametrize(("name", "options"), [
    ("softmax", dict(m=1500, n=1500, d=256, left=300, causal=True)),
    ("entmax15", dict(b=2, g=4, m=729, n=729, d=72)),
    ("entmax(alpha=1.7)", dict(g=4, m=500, n=500, d=72, causal=True)),
    ("entmax15", dict(g=4, m=1500, n=1500, d=160, causal=True)),
    ("softmax", dict(h=8, m=32, n=8192, d=128)),
    ("entmax15", dict(h=8, m=32, n=8192, d=128)),
    ("entmax15", dict(b=3, h=8, m=1, n=6000, d=128, lengths=True)),
    ("entmax(alpha=1.7)", dict(m=7, n=3000, d=96, causal=True)),
    ("sparsemax", dict(m=20, n=3000, d=128, left=2500)),
])  # fmt: skip
def test_shapes_with_blocks_of_their_own(name, options):
    sizes = dict(b=1, h=4, g=2, dtype=torch.bfloat16, device="cuda", stats=(), e=options["d"])
    check(make(4, name, **sizes | options), slack=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_wide_types(name, dtype):
    for d in (32, 128):
        check(make(2, name, b=1, m=130, n=150, d=d, e=d, dtype=dtype, device="cuda", causal=True))


@pytest.mark.parametrize("dtype", HALF)
def test_wide_heads(dtype):
    check(make(3, b=1, m=200, n=260, d=256, e=192, dtype=dtype, device="cuda"), slack=2.0)


@pytest.mark.parametrize(("d", "e"), [(320, 320), (512, 512), (576, 512)])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid"])
def test_heads_wider_than_256(name, d, e):
    for dtype in (torch.bfloat16, torch.float32) if e == 320 else (torch.bfloat16,):
        sizes = dict(b=1, h=2, g=1, m=70, n=90, d=d, e=e, dtype=dtype, device="cuda")
        check(make(5, name, **sizes, causal=True), slack=2.0)
        check(make(5, name, **sizes, mask=True), slack=2.0)


def test_heads_too_wide_for_shared_memory_go_by_the_reference():
    q, k = torch.randn(2, 1, 1, 20, 600, device="cuda")
    out, stats = regard.attention(q, k, k, return_stats=True)
    assert "shared memory" in regard.attention_path(q, k, k, return_stats=True).reason
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, k), rtol=1e-3, atol=1e-3)
    assert stats.entropy.isfinite().all()
    with pytest.raises(ValueError, match="heads of 600, for which the GPU has no shared memory"):
        regard.attention(q, k, k, backend="triton")


def test_gradients_of_statistics():
    sizes = dict(m=200, n=190, d=32, e=32, device="cuda")
    problem = make(4, **sizes, dtype=torch.float32, sink=True, temperature=True, causal=True)
    check_backward(attention, problem, check_forward(attention, problem), stats=statistics.DIFFERENTIABLE, slack=2.0)


@pytest.mark.parametrize(("dtype", "m", "d"), [(torch.float32, 9, 16), (torch.bfloat16, 288, 64)])
def test_rows_far_below_a_sink_have_a_finite_gain(dtype, m, d):
    depth = torch.tensor([0.0, 20.0, 80.0, 88.0, 90.0, 96.0, 103.0, 110.0, 1000.0], device="cuda").repeat(m // 9)
    problem = make(19, b=1, h=1, g=1, m=m, n=300, d=d, e=d, dtype=dtype, device="cuda", stats=("gradient_gain", "mass"))
    top = problem.scale * (problem.q.double() @ problem.k.double().mT).amax(-1)
    problem = dataclasses.replace(problem, sink=(top + depth).float())
    _, truth = reference.of_problem(problem)
    found = attention.forward(problem).stats.double()
    torch.testing.assert_close(found, truth, rtol=1e-2 if d == 64 else 1e-4, atol=300 * 1.2e-38)  # subnormals are 0


@pytest.mark.parametrize("sharp", [1e-5, 1e-3])
def test_softpick_of_logits_near_0_does_not_cancel(sharp):
    sizes = dict(b=1, h=2, g=1, m=70, n=90, d=32, e=32, device="cuda")
    problem = make(23, "softpick", **sizes, sharp=sharp, stats=("mass", "entropy", "max_weight"))
    answer, (out, truth) = attention.forward(problem), reference.of_problem(problem)
    torch.testing.assert_close(answer.stats.double(), truth, rtol=1e-5, atol=0.0)
    assert (answer.o.double() - out).abs().max() < 1e-5 * out.abs().max()


@pytest.mark.parametrize("m", [1, 70])
def test_participation_of_sigmoid_rows_whose_weights_are_tiny(m):
    sizes = dict(b=1, h=2, g=1, m=m, n=2100, d=32, e=32, device="cuda")
    problem = make(29, "sigmoid(bias=-60)", **sizes, sharp=3.0, stats=("participation",))
    _, truth = reference.of_problem(problem)
    torch.testing.assert_close(attention.forward(problem).stats.double(), truth, rtol=1e-4, atol=0.0)


def test_sharp_and_flat_rows_of_a_long_sequence():
    for sharp in (0.02, 12.0):
        for name in ("softmax", "entmax15", "sparsemax"):
            sizes = dict(b=1, h=2, g=1, m=300, n=9000, d=64, e=64, device="cuda")
            check_forward(attention, make(5, name, **sizes, dtype=torch.bfloat16, sharp=sharp), slack=2.0)


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_same_inputs_same_bits(name):
    problem = make(6, name, b=2, h=8, g=2, m=1000, n=1000, d=64, e=64, dtype=torch.bfloat16, device="cuda", causal=True)
    answers = []
    for _ in range(3):
        answer = attention.forward(problem)
        grads = attention.backward(problem, answer, Upstream(torch.ones_like(answer.o)))
        answers.append((answer.o, answer.stats, grads.q, grads.k, grads.v))
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


def test_more_than_two_to_the_31_elements():
    rows = 2**31 // (128 * 64) + 200
    big = torch.randn(1, rows, 128, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)  # strides beyond int32
    q = big[:, -1:]
    problem = dataclasses.replace(make(0, b=1, h=1, g=1, m=1, n=1), q=q, k=q, v=q, stats=("entropy",), left=3, right=0)
    tail = slice(rows - 300, rows)
    o = attention.forward(problem).o[:, :, tail]
    cut = dataclasses.replace(problem, q=q[:, :, tail], k=q[:, :, tail], v=q[:, :, tail])
    truth, _ = reference.of_problem(cut)
    torch.testing.assert_close(o[:, :, 4:].double(), truth[:, :, 4:], rtol=2e-2, atol=2e-2)


def test_hidden_nan_changes_nothing():
    for name in ("softmax", "entmax15"):
        sizes = dict(b=2, m=300, n=400, d=64, e=64, device="cuda")
        problem = make(7, name, **sizes, dtype=torch.bfloat16, lengths=True, stats=())
        lengths = problem.key_lengths.clamp(max=400)
        seen = (torch.arange(400, device="cuda") < lengths[:, None])[:, None, :, None]
        answers = []
        for fill in (0.0, math.nan):
            p = dataclasses.replace(problem, k=problem.k.masked_fill(~seen, fill), v=problem.v.masked_fill(~seen, fill))
            answer = attention.forward(p)
            grads = attention.backward(p, answer, Upstream(torch.ones_like(answer.o)))
            answers.append((answer.o, grads.q, grads.k, grads.v))
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.parametrize("name", ["softmax", "softpick", "entmax15"])
def test_room_for_the_output_in_any_order(name, monkeypatch):
    """Launches are remembered by what their tensors look like: one after another they must not be mixed up."""
    monkeypatch.setattr(cudnn, "why_not", lambda problem, has_statistics: "its bits depend on the layout of o")
    for dtype in (torch.bfloat16, torch.float32):
        problem = make(11, name, b=2, h=4, g=2, m=160, n=160, d=64, e=64, dtype=dtype, device="cuda", stats=())
        b, h, m, e = problem.q.shape
        plain = attention.forward(problem).o
        for _ in range(2):
            across = torch.full((b, m, h, e), math.nan, dtype=dtype, device="cuda").transpose(1, 2)
            assert torch.equal(attention.forward(problem, across).o, plain)
            assert torch.equal(attention.forward(problem).o, plain)
            found = []
            for room, do in (
                (None, plain),
                (across, plain),
                (across, plain.transpose(1, 2).contiguous().transpose(1, 2)),
            ):
                grads = attention.backward(problem, attention.forward(problem, room), Upstream(do))
                found.append((grads.q, grads.k, grads.v))
            assert all(torch.equal(x, y) for one in found[1:] for x, y in zip(found[0], one, strict=True))
