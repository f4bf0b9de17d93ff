"""The CPU attention against the dense float64 oracle: outputs, statistics and every gradient, on random options."""

import dataclasses
import math

import pytest
import torch
from random_problems import close, draw, oracle
from rows_data import ORDERED

from regard import normalizers, reference
from regard._backends.cpu.attention import launch as attention
from regard._call import philox
from regard._call.problem import Problem, Upstream
from regard.statistics import NAMES


@pytest.fixture
def poisoned(monkeypatch):
    """What is allocated without being filled holds NaN."""
    real = torch.empty

    def empty(*args, **kwargs):
        x = real(*args, **kwargs)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ORDERED)
def test_random_options_against_the_oracle(name, poisoned):
    for seed in range(12):
        problem, upstream = draw(name, seed)
        result = attention.forward(problem)
        gradients = attention.backward(problem, result, upstream)
        o, stats, exact = oracle(problem, upstream)
        close(result.o, o, 1e-10, f"{name} {seed} o")
        for statistic, ours, theirs in zip(NAMES, result.stats, stats, strict=True):
            close(ours, theirs, 1e-9, f"{name} {seed} {statistic}")
        for argument, gradient in exact.items():
            close(getattr(gradients, argument), gradient, 1e-8, f"{name} {seed} d{argument}")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ORDERED)
def test_single_precision(name, poisoned):
    for seed in range(6):
        problem, upstream = draw(name, seed, torch.float32, temperature=None)
        upstream = dataclasses.replace(upstream, temperature=False, stats={})
        result = attention.forward(problem)
        gradients = attention.backward(problem, result, upstream)
        o, stats, exact = oracle(problem, upstream)
        assert result.o.dtype == result.stats.dtype == gradients.q.dtype == torch.float32
        close(result.o, o, 2e-5, f"{name} {seed} o")
        for statistic, ours, theirs in zip(NAMES, result.stats, stats, strict=True):
            close(ours, theirs, 1e-4, f"{name} {seed} {statistic}")
        largest = (upstream.o.abs().max() * problem.v.abs().max()).item()  # of dp, and with it of the terms of ds
        for argument, gradient in exact.items():
            close(getattr(gradients, argument), gradient, 2e-5, f"{name} {seed} d{argument}", largest)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 8.0])
def test_error_is_no_larger_than_torchs(sharpness):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 600, 32, generator=generator) for _ in range(4))
    q = q * sharpness
    problem = Problem(q, k, v, normalizers.get("softmax"), 1 / math.sqrt(32), causal=True)
    result = attention.forward(problem)
    ours = attention.backward(problem, result, Upstream(do))
    o, _, exact = oracle(problem, Upstream(do))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    theirs.backward(do)
    pairs = [(result.o, theirs.detach(), o)]
    pairs += [(getattr(ours, name), leaf.grad, exact[name]) for name, leaf in zip("qkv", leaves, strict=True)]
    for mine, torchs, truth in pairs:
        rounding = torch.finfo(torch.float32).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= 2 * ((torchs - truth).abs().max() + rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    for name in ("softmax", "entmax15"):
        problem, upstream = draw(name, 3, dtype, temperature=None)
        upstream = dataclasses.replace(upstream, temperature=False, stats={})
        result = attention.forward(problem)
        gradients = attention.backward(problem, result, upstream)
        o, _, exact = oracle(problem, upstream)
        assert result.o.dtype == gradients.k.dtype == dtype and result.stats.dtype == torch.float32
        close(result.o, o, 0.6 * torch.finfo(dtype).eps, name)
        for argument, gradient in exact.items():
            close(getattr(gradients, argument), gradient, 0.6 * torch.finfo(dtype).eps, f"{name} d{argument}")


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits_stay_finite(size):
    for name in ("softmax", "softmax1", "sparsemax", "entmax15", "relu"):
        q = torch.tensor([[[[size], [0.0], [-size]]]], dtype=torch.bfloat16)
        k = torch.tensor([[[[1.0], [-1.0], [0.5], [1.0]]]], dtype=torch.bfloat16)
        v = torch.arange(4.0).to(torch.bfloat16).view(1, 1, 4, 1)
        problem = Problem(q, k, v, normalizers.get(name), 1.0, stats=NAMES)
        result = attention.forward(problem)
        gradients = attention.backward(problem, result, Upstream(torch.ones_like(result.o)))
        assert all(x.isfinite().all() for x in (result.o, result.stats, gradients.q, gradients.k, gradients.v))
        close(result.o, reference.of_problem(problem)[0], 0.01, name)


def test_nearly_one_hot_rows_keep_entropy_and_gain():
    q = torch.tensor([[[[1.0]]]])
    k = torch.tensor([30.0, 0.0, 0.0]).view(1, 1, 3, 1)
    problem = Problem(q, k, torch.zeros(1, 1, 3, 1), normalizers.get("softmax"), 1.0, stats=NAMES)
    found = dict(zip(NAMES, attention.forward(problem).stats.flatten().tolist(), strict=True))
    small = 2 * math.exp(-30.0)
    assert found["gradient_gain"] == pytest.approx(2 * small, rel=1e-5)
    assert found["entropy"] == pytest.approx(small + 30 * small, rel=1e-5)


def test_a_row_of_a_million_keys():
    n = 1_000_000
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(1, 1, n, 1, generator=generator) * 0.01 + 3.0
    q = torch.ones(1, 1, 1, 1)
    problem = Problem(q, k, torch.ones(1, 1, n, 1), normalizers.get("softmax"), 1.0, stats=NAMES)
    result = attention.forward(problem)
    _, stats = reference.of_problem(problem)
    assert result.o.item() == pytest.approx(1.0, abs=2e-6)
    for statistic, ours, theirs in zip(NAMES, result.stats.flatten().tolist(), stats.flatten().tolist(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4), statistic


HIDING = {
    "key_lengths": (dict(key_lengths=torch.tensor([6, 6])), slice(6, None)),
    "causal edge": (dict(causal=True), slice(8, None)),
    "window": (dict(left=2, right=1), slice(9, None)),
    "mask": (dict(mask=(torch.arange(12) < 6).expand(2, 4, 8, 12)), slice(6, None)),
    "mask and causal": (
        dict(mask=torch.ones(8, 12, dtype=torch.bool).triu().expand(2, 4, 8, 12), causal=True),
        slice(8, None),
    ),
    "bias": (dict(bias=torch.where(torch.arange(12) < 6, 0.0, -math.inf).expand(2, 4, 8, 12)), slice(6, None)),
}


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_keys_that_no_query_sees_change_nothing(how, poison, name):
    options, unseen = HIDING[how]
    generator = torch.Generator().manual_seed(2)
    q, do = (torch.randn(2, 4, 8, 4, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, 12, 4, generator=generator) for _ in range(2))
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, unseen] = bad_v[:, :, unseen] = poison
    results = []
    for keys, values in ((k, v), (bad_k, bad_v)):
        problem = Problem(q, keys, values, normalizers.get(name), 0.5, stats=NAMES, softcap=3.0, **options)
        upstream = Upstream(do, bias="bias" in options)
        result = attention.forward(problem)
        gradients = vars(attention.backward(problem, result, upstream)).values()
        results.append((result.o, result.stats, *(x for x in gradients if x is not None)))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned) and clean.isfinite().all()


@pytest.mark.parametrize(
    ("options", "key"), [(dict(left=2, right=0), 0), (dict(left=1, right=2), 7), (dict(causal=True), 11)]
)
def test_a_bad_key_reaches_the_queries_that_see_it_and_no_other(options, key):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 12, 4, generator=generator) for _ in range(3))
    k[:, :, key] = math.nan
    mask = torch.ones(1, 2, 12, 12, dtype=torch.bool)  # behind a mask, bad keys that no query sees are looked for
    problem = Problem(q, k, v, normalizers.get("softmax"), 0.5, mask=mask, **options)
    left, right = problem.reach
    i = torch.arange(12)
    sees = (key >= i - (12 if left is None else left)) & (key <= i + right)
    assert sees.any() and not sees.all()
    assert torch.equal(attention.forward(problem).o.isfinite().all(-1), ~sees.expand(1, 2, 12))


def test_a_row_without_keys_gives_zeros():
    problem, upstream = draw("softmax1", 0, key_lengths=None, left=None, right=None, dropout_p=0.0)
    mask = torch.ones(*problem.q.shape[:3], problem.k.shape[2], dtype=torch.bool)
    mask[:, :, 0] = False
    problem.mask = mask
    result = attention.forward(problem)
    stats = dict(zip(NAMES, result.stats[..., 0], strict=True))
    assert (result.o[:, :, 0] == 0).all() and (attention.backward(problem, result, upstream).q[:, :, 0] == 0).all()
    for name, values in stats.items():
        assert (values == (-math.inf if name in ("max_logit", "logsumexp") else 0.0)).all(), name


@pytest.mark.parametrize(
    ("name", "size", "bias"), [("softpick", 1e-6, 0.0), ("softpick", 1e-12, 0.0), ("sigmoid", 3.0, -62.0)]
)
def test_weights_far_below_one_are_measured_as_others_are(name, size, bias):
    """softpick of logits near 0, where exp(s) − 1 cancels; sigmoid of low ones, whose squares no float32 holds."""
    generator = torch.Generator().manual_seed(7)
    q, k, v, do = (torch.randn(1, 2, n, 8, generator=generator) for n in (5, 23, 23, 5))
    problem = Problem(q * size, k, v, normalizers.get(name), 0.5, stats=NAMES, bias=torch.full((1, 2, 5, 23), bias))
    wide = {x: getattr(problem, x).double() for x in ("q", "k", "v", "bias")}
    exact = attention.forward(dataclasses.replace(problem, **wide))
    result = attention.forward(problem)
    assert (result.o - exact.o).abs().max() <= 2e-5 * exact.o.abs().max()
    for at, statistic in enumerate(NAMES):
        ours, theirs = result.stats[at], exact.stats[at]
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max(), statistic
    dq, right = (
        attention.backward(x, y, Upstream(z)).q
        for x, y, z in ((problem, result, do), (dataclasses.replace(problem, **wide), exact, do.double()))
    )
    assert (dq - right).abs().max() <= 1e-4 * right.abs().max()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_empty_problems(shape):
    batch, heads, m, n = shape
    q, k, v = torch.ones(batch, heads, m, 5), torch.ones(batch, heads, n, 5), torch.ones(batch, heads, n, 6)
    problem = Problem(q, k, v, normalizers.get("softmax"), 1.0, stats=NAMES)
    result = attention.forward(problem)
    gradients = attention.backward(problem, result, Upstream(torch.ones_like(result.o)))
    assert result.o.shape == (batch, heads, m, 6) and (result.o == 0).all()
    assert gradients.k.shape == k.shape and (gradients.k == 0).all() and (gradients.q == 0).all()
    assert not result.stats.isnan().any()


@pytest.mark.parametrize(
    ("normalizer", "names"),
    [
        ("softmax", ("entropy",)),
        ("softmax", ("logit_variance",)),
        ("softmax", ("logsumexp", "mass")),
        ("sparsemax", ("distance",)),
        pytest.param("softmax", ("distance",), marks=pytest.mark.slow),
        *(
            pytest.param("sparsemax", names, marks=pytest.mark.slow)
            for names in (("entropy",), ("logit_variance",), ("logsumexp", "mass"))
        ),
    ],
)
def test_a_few_statistics_equal_the_same_of_all(names, normalizer):
    problem, _ = draw(normalizer, 1)
    every = dict(zip(NAMES, attention.forward(problem).stats, strict=True))
    found = attention.forward(dataclasses.replace(problem, stats=names)).stats
    assert found.shape == (len(names), *problem.q.shape[:3])
    for name, values in zip(names, found, strict=True):
        close(values, every[name], 1e-12, name)


def test_dropout_is_philox():
    q = k = torch.zeros(2, 3, 5, 2)
    v = torch.eye(5).expand(2, 3, 5, 5)
    seed = torch.tensor([-123456789012345])
    problem = Problem(q, k, v, normalizers.get("softmax"), 1.0, dropout_p=0.4, seed=seed)
    kept = attention.forward(problem).o > 0
    assert torch.equal(kept, philox.keep(seed, (2, 3, 5, 5), 0.4))


def test_nan_beyond_a_shorter_length_stays_hidden():
    """Both batch entries are in one block, whose keys reach to the longer length."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4, 12, 4, generator=generator) for _ in range(3))
    results = []
    for poison in (0.0, math.nan):
        k[0, :, 3:] = v[0, :, 3:] = poison
        problem = Problem(q, k, v, normalizers.get("softmax"), 0.5, key_lengths=torch.tensor([3, 12]))
        result = attention.forward(problem)
        results.append((result.o, attention.backward(problem, result, Upstream(torch.ones_like(q))).q))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned) and clean.isfinite().all()
