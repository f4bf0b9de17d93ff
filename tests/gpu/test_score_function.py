"""Score functions on real shapes, compiled, against the float64 reference on the same GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_data import make
from interval_data import make_interval, with_biases
from score_functions import ALL, FADE, check, with_score

import regard
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry

pytestmark = pytest.mark.filterwarnings("default")
SHAPE = dict(b=2, h=4, g=2, m=1000, n=1000, d=128, e=128, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("name", list(ALL))
def test_every_function(name):
    check(attention, with_score(make(1, **SHAPE, causal=True, stats=("entropy", "max_logit")), name), slack=2.0)


@pytest.mark.parametrize("normalizer", ["softmax", "sigmoid", "entmax15", "softpick"])
def test_every_family_with_all_statistics(normalizer):
    check(attention, with_score(make(2, normalizer, **SHAPE | dict(m=300, n=500)), "clamp"), slack=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 256])
def test_types_and_widths(dtype, width):
    check(attention, with_score(make(3, **SHAPE | dict(dtype=dtype, d=width, e=width, m=257), stats=()), "bend"), 2.0)


@pytest.mark.parametrize("kind", ["documents", "prefix"])
def test_intervals(kind):
    problem = make(4, **SHAPE, stats=("entropy",))
    problem = dataclasses.replace(problem, interval=make_interval(kind, 2, 4, 1000, 1000, 0, "cuda"))
    check(attention, with_score(problem, "fade"), slack=2.0)


def test_beside_biases():
    check(attention, with_score(with_biases(make(5, **SHAPE, stats=()), 1, ("key", "row"), False), "clamp"), slack=2.0)


def test_decoding():
    problem = with_score(make(6, **SHAPE | dict(m=1, n=5000)), "clamp")
    assert registry.choose(problem).name == "decode"
    check(attention, problem, slack=2.0)


def test_a_soft_cap_keeps_the_hopper_kernel_and_others_say_why_not():
    q, k, v = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    capped = regard.bias.ScoreFunction.soft_cap(30.0)
    ours, option = (regard.attention(q, k, v, **x) for x in (dict(score_mod=capped), dict(softcap=30.0)))
    assert torch.equal(ours, option)
    if "not hopper" not in regard.attention_path(q, k, v, softcap=30.0).reason:
        assert "not hopper" not in regard.attention_path(q, k, v, score_mod=capped).reason
    assert "not hopper: a score function" in regard.attention_path(q, k, v, score_mod=FADE).reason


def test_calls_again_replay_and_other_params_count():
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    for rate in (0.1, 0.1, 0.1, 2.0, 2.0):
        function = FADE.with_params(torch.tensor([rate, 3 * rate], device="cuda"))
        exact = regard.attention(q, k, v, score_mod=function, backend="reference")
        torch.testing.assert_close(regard.attention(q, k, v, score_mod=function), exact, rtol=2e-3, atol=2e-3)
