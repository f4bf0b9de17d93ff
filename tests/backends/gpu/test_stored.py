"""Backward through stored ds under Triton's interpreter, on small odd shapes, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")
import interval_data
from attention_data import ROUNDING, Poisoned, check_backward, check_forward, make
from interval_data import with_biases
from launches import replace_support

from regard import reference, statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.backward import bias, stored_ds
from regard._call.problem import Upstream

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
HALF = dict(dtype=torch.float16, stats=())


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    """Every call stores ds, scratch holds NaN, and a block of queries is two blocks of `backward_dkv`."""
    made, found = stored_ds.config_of, []

    def config_of(p, kernel, **flags):
        config, how = made(p, kernel, **flags)
        return (config._replace(BM=32) if kernel == "backward_product" else config), how

    monkeypatch.setattr(attention, "torch", Poisoned())
    monkeypatch.setattr(stored_ds, "torch", Poisoned())
    monkeypatch.setattr(stored_ds, "config_of", config_of)

    def supports(call):
        found.append(call.grads.temperature is None)
        return None if found[-1] else "a gradient of the temperature"

    replace_support(monkeypatch, "BACKWARD_KERNELS", "stored ds", supports)
    for name, number in dict(QUERIES=32, KEYS=16, SCRATCH_BYTES=2**15).items():
        monkeypatch.setattr(stored_ds, name, number)
    return found


CASES = [
    ("softmax", dict(b=1, h=2, g=1, m=50, n=60, causal=True)),
    ("softmax1", dict(b=2, h=2, g=2, m=33, n=20, lengths=True)),
    ("sigmoid", dict(b=1, h=2, g=1, m=20, n=50, causal=True)),
    ("softpick", dict(b=1, h=1, g=1, m=35, n=35, softcap=2.0, sharp=3.0)),
    ("softmax", dict(b=1, h=2, g=2, m=17, n=40, sink=True)),
    ("softmax", dict(b=1, h=1, g=1, m=70, n=75, causal=True)),
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_stored_ds_gives_what_the_oracle_gives(name, options, stored):
    problem = make(1, name, **HALF | options, d=8, e=16)
    check_backward(attention, problem, check_forward(attention, problem), slack=2.0)
    assert stored == [True]


@pytest.mark.parametrize(
    "options",
    [
        dict(b=3, h=2, g=1, m=50, n=60, causal=True),
        dict(b=1, h=4, g=4, m=70, n=90),
        dict(b=2, h=2, g=2, m=80, n=20, lengths=True),
    ],
    ids=str,
)
def test_the_gradient_of_a_relative_bias_is_summed_from_stored_ds(options, stored, monkeypatch):
    monkeypatch.setattr(bias, "torch", Poisoned())
    monkeypatch.setattr(bias, "compute_relative_gradient", None)  # ds is not computed once more
    problem = with_biases(make(3, **HALF | options, d=8, e=16), 4, ("relative",))
    interval_data.check_backward(attention, problem, interval_data.check_forward(attention, problem), slack=2.0)
    assert stored == [True]


def test_a_temperature_whose_gradient_nobody_asks_for(stored):
    problem = make(7, **HALF, b=1, h=2, g=1, m=20, n=25, d=8, e=16, temperature=True, scale=0.7)
    answer = attention.forward(problem)
    do = torch.randn_like(answer.o)
    grads = attention.backward(problem, answer, Upstream(do))
    assert stored == [True]
    leaves = {name: getattr(problem, name).double().requires_grad_() for name in ("q", "k", "v")}
    o, _ = reference.of_problem(dataclasses.replace(problem, **leaves))
    for name, truth in zip(leaves, torch.autograd.grad(o, leaves.values(), do.double()), strict=True):
        error = (getattr(grads, name).double() - truth).norm() / truth.norm()
        assert error <= 8 * ROUNDING[torch.float16], name


def test_gradients_of_statistics():
    problem = make(2, b=1, h=2, g=1, m=33, n=30, causal=True, dtype=torch.float16, sink=True)
    check_backward(attention, problem, check_forward(attention, problem), stats=statistics.DIFFERENTIABLE, slack=2.0)


@pytest.mark.parametrize(
    ("most", "pieces"), [(2**30, 1), (2 * 32 * 32 * 2, 4), (5 * 32 * 32 * 2, 2), (6 * 32 * 32 * 2, 2)]
)
def test_pieces_are_the_whole(monkeypatch, most, pieces):
    """Four batch entries of two heads each, one or two entries at a time."""
    problem = make(3, **HALF, b=4, h=2, g=1, m=20, n=25, d=8, e=8, temperature=True)
    answer = attention.forward(problem)
    upstream = Upstream(torch.randn_like(answer.o))
    truth = attention.backward(problem, answer, upstream)
    monkeypatch.setattr(stored_ds, "SCRATCH_BYTES", most)
    assert len(list(stored_ds.split_heads(problem))) == pieces
    grads = attention.backward(problem, answer, upstream)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(grads, name), getattr(truth, name)), name


def test_heads_of_one_entry_in_parts(monkeypatch):
    problem = make(4, **HALF, b=2, h=6, g=3, m=10, n=12, d=8, e=8)
    monkeypatch.setattr(stored_ds, "SCRATCH_BYTES", 5 * 32 * 16 * 2)  # two of the three groups; never more than asked
    cut = list(stored_ds.split_heads(problem))
    assert [(b.start, h.start, h.stop, g.start, g.stop) for b, h, g in cut] == [
        (0, 0, 4, 0, 2), (0, 4, 8, 2, 4), (1, 0, 4, 0, 2), (1, 4, 8, 2, 4),
    ]  # fmt: skip
    check_backward(attention, problem, check_forward(attention, problem), slack=2.0)


@pytest.mark.parametrize("seen", [18, 20])
def test_hidden_keys_may_hold_anything(seen):
    """Keys beyond the length and keys after the last query."""
    problem = make(5, **HALF, b=1, h=2, g=1, m=20, n=40, d=8, e=8, causal=True)
    clean = dataclasses.replace(problem, key_lengths=torch.tensor([seen]) if seen < 20 else None)
    answer = attention.forward(clean)
    upstream = Upstream(torch.ones_like(answer.o))
    truth = attention.backward(clean, answer, upstream)
    for x in (problem.k, problem.v):
        x[:, :, seen:] = math.nan
    grads = attention.backward(clean, attention.forward(clean), upstream)
    assert torch.equal(grads.q, truth.q) and torch.equal(grads.k, truth.k) and torch.equal(grads.v, truth.v)


def test_a_bad_key_reaches_no_block_of_queries_that_does_not_see_it():
    problem = make(6, **HALF, b=1, h=1, g=1, m=70, n=75, d=8, e=8, causal=True)
    upstream = Upstream(torch.ones(1, 1, 70, 8, dtype=torch.float16))
    truth = attention.backward(problem, attention.forward(problem), upstream)
    problem.k[:, :, 40] = math.nan  # blocks of 32 queries; the first sees keys up to 31
    grads = attention.backward(problem, attention.forward(problem), upstream)
    assert grads.q[:, :, 45].isnan().all() and torch.equal(grads.q[:, :, :32], truth.q[:, :, :32])
