"""The kernels before and after the Hopper forward, interpreted: key moments, and statistics from its raw sums."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import FLOOR, Poisoned, make

from regard import reference
from regard._backends.gpu.attention import config, forward
from regard._backends.gpu.attention.hopper import key_moments

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize(("causal", "m", "n"), [(False, 50, 700), (True, 700, 700), (True, 600, 700), (True, 900, 513)])
def test_key_moments(causal, m, n, monkeypatch):
    monkeypatch.setattr(key_moments, "torch", Poisoned())
    monkeypatch.setattr(key_moments, "PROGRAMS", 6)
    problem = make(0, b=2, h=2, g=1, m=m, n=n, d=16, e=16, dtype=torch.float16, causal=causal)
    moments = key_moments.compute_key_moments(problem, 256 if causal else -1)
    k = problem.k.double().flatten(0, 1)
    ends = range(256, min(m, n), 256) if causal else [n]
    assert moments.products.shape == (2, len(ends), 3 * 16, 16)
    for state, end in enumerate(ends):
        seen = k[:, :end]
        products, lengths = seen.mT @ seen, seen.square().sum((1, 2))
        found = moments.products[:, state].double().unflatten(1, (3, 16)).sum(1)
        assert (found - products).abs().max() <= 1e-6 * products.abs().max()
        assert (moments.sums[:, state] - seen.sum(1)).abs().max() <= 1e-5 * seen.abs().sum(1).max()
        assert (moments.lengths[:, state] - lengths).abs().max() <= 1e-6 * lengths.max()


def compute_raw_sums(p):
    """The raw sums of `forward_hopper`, computed in float64."""
    k = p.k.double().repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
    y = p.q.double() @ k.mT
    i, j = torch.arange(y.shape[-2])[:, None], torch.arange(y.shape[-1])
    seen = (j <= i) | (not p.causal)
    a = p.scale / (1.0 if p.temperature is None else p.temperature.double()[..., None])
    top = y.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    power = ((y - top) * a * math.log2(math.e)).masked_fill(~seen, -math.inf)
    u = power.exp2()
    far = (u * (i - j).abs()).sum(-1)
    log_u = (u * power.masked_fill(~seen, 0.0)).sum(-1)
    y = y.masked_fill(~seen, 0.0)
    reach = (p.q.double().square().sum(-1, keepdim=True) * k.square().sum((-1, -2), keepdim=True))[..., 0]
    found = top[..., 0], u.sum(-1), far, y.sum(-1), y.square().sum(-1), reach, log_u, u.square().sum(-1), y[..., 0]
    return torch.stack(found).float()


@pytest.mark.parametrize("options", [dict(causal=True), dict(sink=True, temperature=True), dict(name="softmax1")])
@pytest.mark.parametrize("sharp", [0.3, 20.0])
def test_statistics_of_sums(options, sharp):
    p = make(1, b=2, h=2, g=1, m=40, n=50, d=16, e=16, dtype=torch.float16, sharp=sharp, **options)
    p.k[1] += 9.0 if sharp < 1 else 0.0  # means that dwarf some of the deviations
    p.q[0, 0, -1], p.q[0, 0, -1, 0] = 0.0, 1.0  # a query whose largest product is 0, far above the rest
    p.k[0, 0, :, 0] = -60.0
    p.k[0, 0, 3, 0] = 0.0
    raw_sums, stats = compute_raw_sums(p), torch.full((len(p.stats), *p.q.shape[:-1]), math.nan)
    raw_sums[5, 1, 0, 7] = math.inf  # a magnitude that no float16 product has
    forward.finish_statistics(p, raw_sums, stats, config.options(p), None)
    imprecise = raw_sums[0] < math.inf
    assert imprecise.any() and not imprecise.all() and imprecise[0, 0, -1] and imprecise[1, 0, 7]
    _, truths = reference.of_problem(p)
    for name, ours, truth in zip(p.stats, stats.double(), truths, strict=True):
        assert ((ours - truth).abs() / (truth.abs() + FLOOR[name])).max() <= 3e-4, name


def test_spans_double_with_the_keys(monkeypatch):
    monkeypatch.setattr(key_moments, "MIN_CAUSAL_KEYS", {1: 0})
    problems = (
        make(0, b=1, h=1, g=1, m=n, n=n, d=1, e=1, dtype=torch.bfloat16, causal=True) for n in (16384, 16385, 32769)
    )
    assert [key_moments.moment_span(problem) for problem in problems] == [1024, 2048, 4096]
