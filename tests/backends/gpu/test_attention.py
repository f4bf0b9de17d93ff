"""The Triton attention kernels under Triton's interpreter, on small odd shapes, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, check_backward, check_forward, make, random_problem
from interpreter import check_overflow
from launches import Watched, launched
from rows_data import FUSED

from regard import masks, normalizers, reference, statistics
from regard._backends.gpu.attention import config
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.backward import bias, dkv, dq
from regard._backends.gpu.attention.forward import launch as forward
from regard._call import philox
from regard._call.problem import Forward, Problem, Upstream

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy overflows where a GPU does too
]
SMALL = dict(b=1, h=2, g=1)
KERNELS = {
    "forward_online": forward,
    "forward_threshold": forward,
    "backward_rows": attention,
    "backward_dq": dq,
    "backward_dkv": dkv,
    "backward_bias": bias,
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (attention, bias):
        monkeypatch.setattr(module, "torch", Poisoned())
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, Watched(getattr(module, name)))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7, 8, 11, 13, 14, 16, 19, 24, 27, 29, 32])
def test_any_options(seed):
    """Every map, and every option beside most of the others; those of these draws that take least time."""
    problem = random_problem(seed)
    check_backward(attention, problem, check_forward(attention, problem))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", FUSED)
def test_every_normalizer_with_statistics(name):
    for options in (dict(h=2, causal=True), dict(mask=True), dict(sharp=10.0, temperature=True)):
        problem = make(3, name, **dict(b=1, h=1, g=1, m=19, n=20) | options)
        answer = check_forward(attention, problem)
        check_backward(attention, problem, answer)


def test_every_kernel_is_launched():
    launched.clear()
    for name, stats in (("softmax", ("logsumexp",)), ("sparsemax", ())):
        problem = make(0, name, b=1, h=1, g=1, m=2, n=3, bias="bh")
        check_backward(attention, problem, check_forward(attention, problem), stats)
    assert launched == set(KERNELS)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "relu"])
def test_other_types(name, dtype):
    problem = make(5, name, **SMALL, dtype=dtype, causal=True, m=18, n=24)
    answer = check_forward(attention, problem)
    check_backward(attention, problem, answer, slack=2.0)


@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_gradients_of_statistics(name):
    for options in (dict(sink=True, causal=True, temperature=True), dict(mask=True, softcap=2.0), dict(lengths=True)):
        problem = make(7, name, **SMALL | dict(b=2), m=18, n=20, **options)
        answer = check_forward(attention, problem)
        check_backward(attention, problem, answer, stats=statistics.DIFFERENTIABLE)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "entmax(alpha=1.2)", "sigmoid"])
def test_only_the_statistics_asked_for(name):
    for names in (("max_logit",), ("entropy", "support"), ("distance", "gradient_gain"), ("logsumexp",), ()):
        check_forward(attention, make(11, name, **SMALL, m=5, n=19, stats=names))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("softcap", [1e4, 1e9, 1e38])
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_a_soft_cap_far_above_the_logits_is_none(name, softcap):
    problem = make(3, name, **SMALL, m=18, n=20, softcap=softcap)
    check_backward(attention, problem, check_forward(attention, problem))


def test_nearly_one_hot_rows_keep_their_gain_and_entropy():
    q = torch.tensor([[[[1.0]], [[1.0]]]])  # [1, 2, 1, 1]
    k = torch.tensor([[[[30.0], [0.0], [0.0]], [[-500.0], [-530.0], [-530.0]]]])
    problem = dataclasses.replace(make(0, b=1, h=2, g=2, m=1, n=3, d=1, e=1), q=q, k=k, scale=1.0)
    answer = attention.forward(problem)
    stats = dict(zip(problem.stats, answer.stats[:, 0, :, 0], strict=True))
    truth = statistics.of_scores(torch.tensor([30.0, 0.0, 0.0], dtype=torch.float64))
    for name in ("gradient_gain", "entropy"):
        torch.testing.assert_close(stats[name].double(), truth[name].expand(2), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_rows_far_below_a_sink_have_a_finite_gain(name):
    """What the keys have beside the sink ends in float32's subnormals; 1/that overflows."""
    depth = torch.tensor([0.0, 20.0, 85.0, 88.0, 90.0, 96.0, 103.0, 110.0, 1000.0])
    problem = make(19, name, b=1, h=1, g=1, m=len(depth), n=5, stats=("gradient_gain", "mass"))
    top = problem.scale * (problem.q @ problem.k.mT).amax(-1)
    problem = dataclasses.replace(problem, sink=top + depth)
    _, truth = reference.of_problem(problem)
    torch.testing.assert_close(attention.forward(problem).stats.double(), truth, rtol=1e-4, atol=2e-38)


@pytest.mark.parametrize("sharp", [1e-6, 300.0])
@pytest.mark.parametrize("m", [1, 9])
def test_support_counts_the_weights_that_underflow(m, sharp):
    """Found by `regard bench accuracy` on a GPU: softpick's, of keys far below the maximum or next to 0."""
    problem = make(17, "softpick", b=1, h=2, g=1, m=m, n=50, d=16, e=16, sharp=sharp, stats=("support",))
    _, truth = reference.of_problem(problem)
    assert torch.equal(attention.forward(problem).stats.double(), truth) and truth.max() > 5


def test_support_counts_the_weights_of_entmax_that_underflow():
    """Next to α = 1 t^(1/(α−1)) is 0 in float32 where t is not."""
    problem = make(17, "entmax(alpha=1.01)", b=1, h=2, g=1, m=9, n=50, d=16, e=16, sharp=30.0, stats=("support",))
    _, truth = reference.of_problem(problem)
    assert torch.equal(attention.forward(problem).stats.double(), truth) and truth.max() > 5


@pytest.mark.parametrize("m", [1, 9])
def test_softpick_of_logits_near_0_does_not_cancel(m):
    names = ("mass", "entropy", "max_weight", "gradient_gain")
    for sharp in (1e-5, 1e-3):
        problem = make(23, "softpick", b=1, h=2, g=1, m=m, n=50, sharp=sharp, stats=names)
        answer, (out, truth) = attention.forward(problem), reference.of_problem(problem)
        torch.testing.assert_close(answer.stats.double(), truth, rtol=2e-6, atol=0.0)
        assert (answer.o.double() - out).abs().max() < 1e-6 * out.abs().max()
        v, do = problem.v.detach().double().requires_grad_(), torch.randn_like(answer.o)
        reference.of_problem(dataclasses.replace(problem, v=v))[0].backward(do.double())
        dv = attention.backward(problem, answer, Upstream(do)).v
        assert (dv.double() - v.grad).abs().max() < 1e-6 * v.grad.abs().max()


@pytest.mark.parametrize("m", [1, 9])
def test_participation_of_sigmoid_rows_whose_weights_are_tiny(m):
    for low in (-20.0, -50.0, -60.0):
        problem = make(29, f"sigmoid(bias={low})", b=1, h=2, g=1, m=m, n=50, sharp=3.0, stats=("participation",))
        _, truth = reference.of_problem(problem)
        torch.testing.assert_close(attention.forward(problem).stats.double(), truth, rtol=1e-5, atol=0.0)


HIDING = (
    dict(causal=True, m=9, n=20),
    dict(left=2, right=2, m=18, n=24),
    dict(mask=True, n=20),
    dict(lengths=True, b=2),
)


def test_what_no_query_sees_changes_nothing():
    for name in ("softmax", "entmax15", "sigmoid"):
        for options in HIDING:
            problem = make(13, name, **dict(b=1, h=1, g=1, m=17, n=20, stats=()) | options)
            visible = torch.ones(problem.q.shape[-2], problem.k.shape[-2], dtype=torch.bool)
            seen = reference_visible(problem, visible).any(-2)  # [B, H, N]
            seen = seen.unflatten(1, (problem.k.shape[1], -1)).any(2)
            assert (~seen).any() or options.get("mask")
            if options.get("mask"):
                problem.mask = problem.mask & (torch.arange(problem.k.shape[-2]) != 4)
                seen = seen & (torch.arange(problem.k.shape[-2]) != 4)
            clean = [x.masked_fill(~seen[..., None], 0.0) for x in (problem.k, problem.v)]
            dirty = [x.masked_fill(~seen[..., None], math.nan) for x in (problem.k, problem.v)]
            do = torch.ones(*problem.q.shape[:-1], problem.v.shape[-1])
            answers = []
            for k, v in (clean, dirty):
                p = dataclasses.replace(problem, k=k, v=v)
                answer = attention.forward(p)
                grads = attention.backward(p, answer, Upstream(do))
                answers.append((answer.o, grads.q, grads.k, grads.v))
            for a, b in zip(*answers, strict=True):
                assert torch.equal(a, b)


def reference_visible(problem, visible):
    window = None if problem.left is None and problem.right is None else (problem.left, problem.right)
    m, n = visible.shape
    interval = masks.dense(m, n, is_causal=problem.causal, window_=window, key_lengths=problem.key_lengths)
    seen = visible if interval is None else visible & interval
    seen = seen if problem.mask is None else seen & problem.mask
    return seen.expand(*problem.q.shape[:-1], n)


def test_nan_and_infinity_stay_in_their_row():
    for name in ("softmax", "entmax15", "sparsemax", "entmax(alpha=1.3)"):
        problem = make(17, name, b=1, h=1, g=1, stats=())
        problem.q[0, 0, 3] = math.nan
        o = attention.forward(problem).o
        assert o[0, 0, 3].isnan().all()
        others = torch.arange(o.shape[-2]) != 3
        truth, _ = reference.of_problem(problem)
        torch.testing.assert_close(o[0, 0, others].double(), truth[0, 0, others], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "entmax(alpha=1.7)", "relu", "sigmoid", "softpick"])
def test_a_row_with_a_nan_logit_says_so_in_every_statistic(name):
    problem = make(18, name, b=1, h=1, g=1, m=20, n=33, causal=True)
    problem.k[0, 0, 15] = math.nan
    problem.q[0, 0, 3] = math.nan
    _, truths = reference.of_problem(problem)
    for statistic, ours, truth in zip(problem.stats, attention.forward(problem).stats, truths, strict=True):
        assert torch.equal(ours.isnan(), truth.isnan()), statistic


@pytest.mark.parametrize("name", ["softmax", "entmax15", "relu", "softmax1"])
def test_huge_logits_stay_finite(name):
    problem = make(19, name, **SMALL, dtype=torch.bfloat16, stats=(), scale=3000.0, m=17)
    answer = attention.forward(problem)
    assert torch.isfinite(answer.o).all()
    grads = attention.backward(problem, answer, Upstream(torch.ones_like(answer.o)))
    assert all(torch.isfinite(x).all() for x in (grads.q, grads.k, grads.v))


@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid"])
def test_empty_sequences(name):
    for sizes in (dict(m=0), dict(n=0), dict(b=0), dict(m=0, n=0)):
        problem = make(23, name, **SMALL | sizes)
        answer = attention.forward(problem)
        grads = attention.backward(problem, answer, Upstream(torch.ones_like(answer.o)))
        for tensor in (answer.o, answer.shift, answer.z, grads.q, grads.k, grads.v):
            assert (tensor == 0).all()
        bare = dict(zip(problem.stats, answer.stats, strict=True))
        assert (bare["logsumexp"] == -math.inf).all() and (bare["entropy"] == 0).all()


def test_dropout_keeps_what_philox_says():
    problem = make(29, b=1, h=2, g=2, m=5, n=18, e=18, dropout=0.4, stats=())
    problem.v = torch.eye(18).expand(1, 2, 18, 18).contiguous()
    kept = philox.keep(problem.seed, (1, 2, 5, 18), 0.4)
    assert torch.equal(attention.forward(problem).o > 0, kept)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("sparsemax", torch.float32), ("entmax15", torch.float32), ("entmax15", torch.bfloat16),
     ("entmax(alpha=1.25)", torch.float32)],
)  # fmt: skip
def test_long_sparse_rows_start_from_a_survey(name, dtype):
    for sharp in (0.05, 1.0, 8.0):
        check_forward(attention, make(41, name, b=1, h=1, g=1, m=9, n=150, dtype=dtype, sharp=sharp))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ["entmax15", "sparsemax", "entmax"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(lengths=True, temperature=True), dict(softcap=2.0)])
def test_short_rows_keep_their_scores(name, options, monkeypatch):
    monkeypatch.setattr(forward, "keeps_scores", lambda p: True)
    blocks = lambda p, config: (config._replace(BM=16, BN=64), {})  # noqa: E731
    monkeypatch.setattr(forward, "choose_resident_blocks", blocks)
    for sharp in (0.1, 1.0, 10.0):
        problem = make(9, name, **SMALL | dict(m=20, n=45), sharp=sharp, theta="row" * (name == "entmax"), **options)
        check_forward(attention, problem)


def test_sparse_weights_are_exact_zeros_and_ties_equal():
    problem = make(31, "entmax15", b=1, h=1, g=1, m=4, n=33, e=33, sharp=6.0)
    problem.k[0, 0, 20] = problem.k[0, 0, 2]
    problem.v = torch.eye(33)[None, None].contiguous()
    answer = attention.forward(problem)
    truth, stats = reference.of_problem(problem)
    assert torch.equal(answer.o > 0, truth > 0) and (answer.o == 0).any()
    assert torch.equal(answer.o[..., 2], answer.o[..., 20])
    support = problem.stats.index("support")
    assert torch.equal(answer.stats[support].double(), stats[support])
    assert ((answer.o.sum(-1) - 1).abs() <= 2e-6).all()


@pytest.mark.parametrize("name", ["softmax", "softpick"])
def test_rows_without_a_sum_are_done_again(name):
    """Blocks of 16 queries, four to a program, from each head's last on: 18 of them, of which three have such a row."""
    problem = make(37, name, b=1, h=3, g=1, m=85, n=77, d=16, e=16, causal=True)
    answer = attention.forward(problem)
    truth = [answer.o, answer.shift, answer.z, answer.stats.clone()]
    rooms = [torch.cat([x.flatten(), torch.full_like(x.flatten(), math.nan)]) for x in truth[:3]]  # NaN behind
    o, shift, z = (room[: x.numel()].view_as(x) for room, x in zip(rooms, truth, strict=False))
    for h, i in ((0, 84), (1, 40), (2, 0)):
        z[0, h, i] = math.nan
        o[0, h, i] = shift[0, h, i] = answer.stats[0][0, h, i] = 7.0
    for x in (o, truth[0]):
        x[0, 1, 50] = x[0, 1, 84] = 7.0  # in no block with such a row
    forward.recompute_overflow(problem, Forward(o, shift, z, answer.stats), config.options(problem), None)
    assert all(map(torch.equal, truth, (o, shift, z, answer.stats)))
    assert all(room[room.numel() // 2 :].isnan().all() for room in rooms)


def test_same_inputs_same_bits():
    problem = make(37, "softmax", **SMALL, causal=True, bias="bh")
    first, second = (attention.forward(problem) for _ in range(2))
    assert torch.equal(first.o, second.o) and torch.equal(first.stats, second.stats)


def test_sink_of_a_map_without_exponentials_is_refused():
    with pytest.raises(ValueError, match="sink"):
        attention.forward(dataclasses.replace(make(0, "relu"), sink=torch.zeros(2, 4, 21)))


def test_statistics_of_short_numbers_wait_for_the_last_keys_to_leave():
    """A row whose τ 16-bit weights are content with before the last keys have left the support: entropy 9e-4 off."""
    y = [0.0752, 0.0806, -1.258, -0.629, -0.3066, 0.9336, -0.5195, -0.8242, -0.582, 1.5547, 0.918, 0.3066, 0.0771]
    q = torch.zeros(1, 1, 17, 8, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, len(y), 8, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 1.0, torch.tensor(y)
    problem = Problem(q, k, k, normalizers.get("entmax15"), 1.0, stats=("entropy",))
    truth = statistics.of_scores(k[..., 0].double(), normalizer="entmax15").entropy
    assert float((attention.forward(problem).stats - truth).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_rows_more_than_32_bits_from_the_first_of_their_block(name, monkeypatch):
    """Strides below 2³¹, fifteen of which are not; the memory between is never touched."""
    check_overflow(monkeypatch)
    step, count = 2**31 // 15 + 1, 16
    page = torch.empty(step * count, dtype=torch.float16)
    near = make(4, name, b=1, h=1, g=1, m=count, n=count, d=8, e=8, dtype=torch.float16, causal=True)
    far = {}
    for place, key in enumerate("qkv"):
        far[key] = page.as_strided((1, 1, count, 8), (1, 1, step, 1), 8 * place).copy_(getattr(near, key))
    problem = dataclasses.replace(near, **far)
    check_backward(attention, problem, check_forward(attention, problem))
