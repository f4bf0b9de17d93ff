"""Backward of long rows, ds stored and in Gluon, against the float64 oracle on the same GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_data import ROUNDING, Poisoned, check_backward, check_forward, make, relative

from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.backward import cudnn, dkv, stored_ds
from regard._call.problem import Upstream
from regard._facts import supports_gluon

pytestmark = pytest.mark.filterwarnings("default")
WHY_NOT = cudnn.why_not
WIDE = dict(b=1, h=2, g=1, d=128, e=128, dtype=torch.bfloat16, device="cuda", stats=())


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """What each backward call took: [is ds stored?, are dk and dv in Gluon?]. Short rows count as long ones."""
    taken = []
    choose_backward, supports_hopper = registry.choose_backward, dkv.supports_hopper

    def choose(call):
        kernel = choose_backward(call)
        taken.append([kernel.name == "stored ds", None])
        return kernel

    def gluon(*call):
        reason = supports_hopper(*call)
        taken[-1][1] = reason is None
        return reason

    for module in (attention, stored_ds):
        monkeypatch.setattr(module, "torch", Poisoned())
    monkeypatch.setattr(registry, "choose_backward", choose)
    monkeypatch.setattr(cudnn, "why_not", lambda problem, has_statistics: "our own kernels are tested here")
    monkeypatch.setattr(dkv, "supports_hopper", gluon)
    for module, name, number in (
        (stored_ds, "SHORT", 64),
        (stored_ds, "FILL", 0),
        (dkv, "SHORT", 64),
    ):
        monkeypatch.setattr(module, name, number)
    return taken


def on_hopper() -> bool:
    return supports_gluon(torch.device("cuda", torch.cuda.current_device()))


def check(problem, stats=()):
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), stats, slack=2.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", dict(m=320, n=320, causal=True)),
        ("softmax", dict(m=300, n=333, h=4, g=2, b=2, sharp=8.0, dtype=torch.float16)),
        ("softmax1", dict(m=332, n=200, h=3, causal=True, sharp=0.1)),
        ("sigmoid", dict(m=200, n=256, causal=True)),
        ("softpick", dict(m=260, n=190, sharp=3.0)),
        ("softmax", dict(m=300, n=280, b=2, lengths=True)),
    ],
)
def test_stored_in_gluon(name, options, chosen):
    check(make(1, name, **WIDE | options))
    assert chosen == [[True, on_hopper()]]


@pytest.mark.parametrize(
    ("name", "options"), [("entmax15", dict(m=320, n=320, causal=True)), ("sparsemax", dict(m=300, n=333, h=4, g=2))]
)
def test_threshold_maps_in_gluon(name, options, chosen):
    check(make(2, name, **WIDE | options))
    assert chosen == [[False, on_hopper()]]


@pytest.mark.parametrize(
    "options",
    [
        dict(softcap=2.0, d=96, e=80),
        dict(softcap=1e9, d=96, e=80),
        dict(m=301, causal=True),
    ],
)
def test_stored_in_triton(options, chosen):
    check(make(3, **WIDE | dict(m=300, n=280) | options))
    assert chosen == [[True, False]]


def test_gradients_of_statistics(chosen):
    check(make(4, **WIDE | dict(m=300, n=290, causal=True, stats=statistics.NAMES)), statistics.DIFFERENTIABLE)
    assert chosen == [[True, False]]


def test_a_temperature_without_a_gradient(chosen):
    problem = make(5, **WIDE | dict(m=200, n=210, temperature=True))
    answer = attention.forward(problem)
    upstream = Upstream(torch.randn_like(answer.o))
    ours = attention.backward(problem, answer, upstream)
    warm = attention.backward(problem, answer, dataclasses.replace(upstream, temperature=True))
    assert [call[0] for call in chosen] == [True, False]
    for name in ("q", "k", "v"):
        assert relative(getattr(ours, name), getattr(warm, name)) < ROUNDING[torch.bfloat16], name


def test_any_scratch_size_gives_the_same_bits(monkeypatch):
    problem = make(6, **WIDE | dict(b=2, h=4, g=2, m=512, n=512, causal=True))
    answer = attention.forward(problem)
    upstream = Upstream(torch.randn_like(answer.o))
    truth = attention.backward(problem, answer, upstream)
    for most in (2**30, 5 * 512 * 512 * 2, 2 * 512 * 512 * 2):
        monkeypatch.setattr(stored_ds, "SCRATCH_BYTES", most)
        grads = attention.backward(problem, answer, upstream)
        for name in ("q", "k", "v"):
            assert torch.equal(getattr(grads, name), getattr(truth, name)), (most, name)


def test_hidden_keys_may_hold_nan():
    problem = make(7, **WIDE | dict(m=200, n=300, causal=True))
    answer = attention.forward(problem)
    upstream = Upstream(torch.ones_like(answer.o))
    truth = attention.backward(problem, answer, upstream)
    for x in (problem.k, problem.v):
        x[:, :, 200:] = math.nan
    grads = attention.backward(problem, answer, upstream)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(grads, name), getattr(truth, name)), name
    assert not grads.k[:, :, 200:].any() and not grads.v[:, :, 200:].any()


def test_scratch_is_bounded():
    problem = make(8, **WIDE | dict(h=8, g=8, m=8192, n=8192, causal=True))
    answer = attention.forward(problem)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = attention.backward(problem, answer, Upstream(torch.ones_like(answer.o)))
    scratch = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in (grads.q, grads.k, grads.v))
    assert 0.9 * stored_ds.SCRATCH_BYTES < scratch < 1.1 * stored_ds.SCRATCH_BYTES


@pytest.mark.parametrize(
    "options",
    [
        dict(d=64, e=64, causal=True),
        dict(d=80, e=80),
        dict(d=192, e=128, causal=True),
        dict(d=256, e=256, m=197, n=197),
        dict(d=128, e=128, h=8, g=2, causal=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("stats", [(), statistics.NAMES], ids=["plain", "statistics"])
def test_the_backward_of_cudnn(options, stats, monkeypatch):
    monkeypatch.setattr(cudnn, "why_not", WHY_NOT)
    sizes = dict(b=2, h=4, g=4, m=300, n=300, dtype=torch.bfloat16, device="cuda", stats=stats)
    problem = make(5, **sizes | options)
    assert cudnn.why_not(problem, has_statistics=False) is None
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), (), slack=2.0)
