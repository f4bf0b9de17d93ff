"""Few queries over many keys: the split kernels under Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, check_backward, check_forward, make
from launches import Watched, launched
from rows_data import FUSED

from regard import normalizers, statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.forward import decode

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SMALL = dict(b=1, h=2, g=1, m=3, n=41)
SPLITTING = [name for name in FUSED if normalizers.get(name).family != "threshold"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts of 16 keys, so that 41 keys make three; every fresh tensor is full of NaN."""
    monkeypatch.setattr(decode, "KEYS", 33)
    monkeypatch.setattr(decode, "SHORTEST", 8)
    monkeypatch.setattr(attention, "torch", Poisoned())
    monkeypatch.setattr(decode, "torch", Poisoned())
    for name in ("forward_split", "forward_merge"):
        monkeypatch.setattr(decode, name, Watched(getattr(decode, name)))
    launched.clear()
    yield
    assert {"forward_split", "forward_merge"} <= launched


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SPLITTING)
def test_every_splitting_normalizer_with_statistics(name):
    for options in (dict(), dict(sharp=10.0, temperature=True)):
        problem = make(3, name, **SMALL, **options)
        check_backward(attention, problem, check_forward(attention, problem))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "options", [dict(lengths=True, b=2), dict(left=9, right=20), dict(causal=True), dict(softcap=2.0, sink=True),
                dict(strided=True, scale=-0.4), dict(h=6, g=2, m=11), dict(dtype=torch.bfloat16)],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_options(options):
    check_forward(attention, make(5, **SMALL | options))


def test_only_the_statistics_asked_for():
    for names in (("max_logit",), ("distance", "gradient_gain"), ("logsumexp",), ()):
        check_forward(attention, make(11, "softpick", **SMALL, stats=names))


def test_nearly_one_hot_rows_keep_their_gain_and_entropy():
    """The maximum of one part, ties of it in another, and far below it everything else."""
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 41, 1)
    for ties in ([20], [20, 40]):
        k[0, 0, ties] = 30.0
        problem = dataclasses.replace(make(0, b=1, h=1, g=1, m=1, n=41, d=1, e=1), q=q, k=k, scale=1.0)
        answer = attention.forward(problem)
        stats = dict(zip(problem.stats, answer.stats[:, 0, 0, 0], strict=True))
        truth = statistics.of_scores(k[0, 0, :, 0].double())
        for name in ("gradient_gain", "entropy", "participation"):
            torch.testing.assert_close(stats[name].double(), truth[name], rtol=1e-4, atol=0.0)


def test_keys_that_nobody_sees_may_hold_nan():
    problem = make(7, **SMALL | dict(b=2), lengths=True)
    clean = attention.forward(problem)
    for tensor in (problem.k, problem.v):
        for row, length in zip(tensor, problem.key_lengths, strict=True):
            row[:, length:] = math.nan
    dirty = attention.forward(problem)
    assert torch.equal(clean.o, dirty.o) and torch.equal(clean.stats, dirty.stats)
