"""The kernels after the Hopper forward, interpreted: statistics from its raw sums."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import FLOOR, make
from interval_data import dense_twin, find_truth, with_biases

from regard import reference
from regard._backends.gpu.attention import config
from regard._backends.gpu.attention.forward import launch as forward
from regard._backends.gpu.attention.masks.tables import add_key_index

HIDDEN = -(2.0**100)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def compute_raw_sums(p):
    """The raw sums of `forward_hopper`, computed in float64."""
    k = p.k.double().repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
    y, a = p.q.double() @ k.mT, p.scale
    if p.softcap is not None:
        y, a = p.softcap * torch.tanh(y * p.scale / p.softcap), 1.0
    if p.bias is not None or p.relative is not None:
        y = y + dense_twin(p).bias / p.scale
    if p.temperature is not None:
        a = a / p.temperature.double()[..., None]
    i, j = torch.arange(y.shape[-2])[:, None], torch.arange(y.shape[-1])
    lengths = torch.full((len(y),), y.shape[-1]) if p.key_lengths is None else p.key_lengths
    first = (i - (len(i) if p.reach[0] is None else p.reach[0])).clamp_min(0)
    visible = ((j <= i) | (not p.causal)) & (j >= first) & (j < lengths[:, None, None, None])
    top = y.masked_fill(~visible, HIDDEN).amax(-1, keepdim=True)
    power = ((y - top) * a * math.log2(math.e)).masked_fill(~visible, -math.inf)
    u = power.exp2()
    distance = (u * (i - j).abs()).sum(-1)
    log_u = (u * power.masked_fill(~visible, 0.0)).sum(-1)
    first_y = y.gather(-1, first.clamp_max(y.shape[-1] - 1).expand(*y.shape[:-1], 1))[..., 0]
    y = y.masked_fill(~visible, 0.0)
    squares = y.square().sum(-1), log_u, u.square().sum(-1)
    return torch.stack([top[..., 0], u.sum(-1), distance, y.sum(-1), *squares, first_y]).float()


OPTIONS = [
    dict(causal=True),
    dict(sink=True, temperature=True),
    dict(name="softmax1"),
    dict(causal=True, softcap=30.0, temperature=True),
    dict(causal=True, left=15),
    dict(lengths=True, sink=True),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
@pytest.mark.parametrize("sharp", [0.3, 20.0])
def test_statistics_of_sums(options, sharp):
    p = make(1, b=2, h=2, g=1, m=40, n=50, d=16, e=16, dtype=torch.float16, sharp=sharp, **options)
    p.k[1] += 9.0 if sharp < 1 else 0.0  # means that dwarf some of the deviations
    p.q[0, 0, -1], p.q[0, 0, -1, 0] = 0.0, 1.0  # a query whose largest product is 0, far above the rest
    p.k[0, 0, :, 0] = -60.0
    p.k[0, 0, 36 if "left" in options else 3, 0] = 0.0
    raw_sums, stats = compute_raw_sums(p), torch.full((len(p.stats), *p.q.shape[:-1]), math.nan)
    raw_sums[0] += 1e-6 * raw_sums[0].abs() if p.softcap is not None else 0.0  # the kernel's tanh is another one
    forward.finish_statistics(p, raw_sums, stats, config.options(p), None)
    imprecise = raw_sums[0] < math.inf
    assert imprecise.any() and not imprecise.all() and imprecise[0, 0, -1]
    _, truths = reference.of_problem(p)
    for name, ours, truth in zip(p.stats, stats.double(), truths, strict=True):
        empty = ~torch.isfinite(truth)
        assert torch.equal(ours[empty], truth[empty]), name
        assert ((ours - truth).abs() / (truth.abs() + FLOOR[name]))[~empty].max() <= 3e-4, name


@pytest.mark.parametrize("kind", ["key", "relative"])
@pytest.mark.parametrize("sharp", [0.3, 20.0])
def test_statistics_of_sums_with_a_bias(kind, sharp):
    """The maximum of the Hopper kernel, whose products hold the bias, is rounded otherwise than in the second pass."""
    p = make(2, b=2, h=2, g=1, m=40, n=50, d=16, e=16, dtype=torch.float16, sharp=sharp, causal=True)
    p = with_biases(p, 3, (kind,))
    head = p.relative[0] if p.bias is None else p.bias[0, 0, 0]
    head -= 1000.0
    p.q[0, 0, -1], p.q[0, 0, -1, 0] = 0.0, 1.0  # a nearly one-hot row
    p.k[0, 0, :, 0] = -60.0
    p.k[0, 0, 3, 0] = 0.0
    raw_sums, stats = compute_raw_sums(p), torch.full((len(p.stats), *p.q.shape[:-1]), math.nan)
    raw_sums[[0, 7]] *= 1.0 + 1e-6
    forward.finish_statistics(p, raw_sums, stats, add_key_index(p, config.options(p)), None)
    imprecise = raw_sums[0] < math.inf
    assert imprecise[0, 0, -1] and not imprecise.all()
    for name, ours, truth in zip(p.stats, stats.double(), find_truth(p)[1], strict=True):
        assert ((ours - truth).abs() / (truth.abs() + FLOOR[name])).max() <= 3e-4, name
