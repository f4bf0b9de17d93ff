"""Biases by relative position, and statistics beside any bias, in the Hopper kernels, against dense float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_data import FLOOR, make
from hopper_data import poison
from interval_data import check_backward, check_forward, make_interval, with_biases

import regard
from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.backward import bias as bias_gradient
from regard._backends.gpu.attention.backward import dkv, stored_ds
from regard._backends.gpu.attention.hopper import biases, spans

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
ALL = statistics.NAMES
MANY = dict(b=2, h=8, g=4, m=1100, n=1100, d=128, e=128)  # more blocks than multiprocessors: the persistent kernel
FEW = dict(b=1, h=4, g=2, m=780, n=1001, d=128, e=128)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)
    for module in (spans, biases, bias_gradient, stored_ds):
        monkeypatch.setattr(module, "torch", attention.torch)


def make_relative(seed, name="softmax", interval=None, **options):
    """A problem with a table by relative position, small random numbers, that takes the Hopper forward."""
    p = with_biases(make(seed, name, device="cuda", **dict(dtype=torch.bfloat16) | options), seed, ("relative",))
    if interval is not None:
        (b, h, m, _), n = p.q.shape, p.k.shape[2]
        p = replace(p, interval=make_interval(interval, b, h, m, n, seed, "cuda"))
    assert registry.choose(p).name == "hopper", registry.describe(p)
    return p


FORWARD = [
    dict(stats=(), **MANY),
    dict(stats=ALL, **MANY),
    dict(stats=ALL, **FEW),
    dict(stats=(), causal=True, **FEW),
    dict(stats=ALL, causal=True, sharp=12.0, **MANY),
    dict(stats=ALL, causal=True, left=150, **MANY),
    dict(stats=ALL, lengths=True, temperature=True, **MANY),
    dict(stats=(), name="softmax1", sink=True, **MANY),
    dict(stats=ALL, interval="documents", **MANY),
    dict(stats=ALL, **MANY | dict(d=64, e=64)),
    dict(stats=(), **FEW | dict(d=80, e=80)),
    dict(stats=(), **FEW | dict(d=256, e=256)),
    dict(stats=ALL, dtype=torch.float16, **MANY),
]


def describe(options):
    return ",".join(f"{key}={value}" for key, value in options.items() if key not in ("stats", "b", "h", "g", "e"))


@pytest.mark.parametrize("options", FORWARD, ids=describe)
def test_forward_of_a_relative_bias(options):
    check_forward(attention, make_relative(1, **options), slack=2.0)


@pytest.mark.parametrize("stats", [ALL, ()], ids=["statistics", "plain"])
def test_a_table_that_all_heads_share(stats):
    p = make_relative(2, stats=stats, **MANY)
    check_forward(attention, replace(p, relative=p.relative[:1].expand(8, -1)), slack=2.0)


@pytest.mark.parametrize("stats", [ALL, ()], ids=["statistics", "plain"])
def test_a_steep_table(stats):
    """Far keys weigh nothing, and the largest score of a row comes in its last tile or its first."""
    p = make_relative(3, stats=stats, **MANY)
    away = torch.arange(1 - 1100, 1100, device="cuda").abs()
    slopes = torch.tensor([0.5, -0.5, 0.2, -0.2, 0.02, -0.02, 0.0, 3.0], device="cuda")
    check_forward(attention, replace(p, relative=-slopes[:, None] * away), slack=2.0)


def hide_ahead(p):
    """p with −inf for keys more than 20 ahead of a query, in two heads, and for each key far behind it in a third."""
    away = torch.arange(p.relative.shape[1], device="cuda") - (p.q.shape[2] - 1)
    table = p.relative.clone()
    table[1:3, away > 20] = -math.inf
    table[4, away < -300] = -math.inf
    return replace(p, relative=table)


@pytest.mark.parametrize("stats", [ALL, ()], ids=["statistics", "plain"])
def test_an_entry_of_minus_infinity_hides_keys(stats):
    check_forward(attention, hide_ahead(make_relative(4, stats=stats, **MANY)), slack=2.0)


def test_a_table_of_minus_infinity_leaves_empty_rows():
    p = make_relative(5, stats=ALL, **FEW)
    table = p.relative.clone()
    table[1] = -math.inf
    answer = check_forward(attention, replace(p, relative=table), slack=2.0)
    assert not answer.o[:, 1].any()


BACKWARD = [
    ("stored ds", dict(**MANY)),
    ("stored ds", dict(causal=True, **MANY)),
    ("stored ds", dict(lengths=True, **MANY)),
    ("stored ds", dict(causal=True, left=300, **MANY)),
    ("stored ds", dict(interval="documents", **MANY)),
    ("stored ds", dict(name="softmax1", sink=True, **MANY)),
    ("stored ds", dict(dtype=torch.float16, sharp=4.0, **MANY)),
    ("stored ds", dict(**MANY | dict(m=1028, n=1500))),
    ("two sweeps", dict(**FEW)),
]


def check_gradients(p, kernel, monkeypatch):
    """Every gradient, the table's among them, and that the Gluon kernel gave dk and dv."""
    chosen, taken = [], []
    choose, run = registry.choose_backward, dkv._run_hopper
    monkeypatch.setattr(registry, "choose_backward", lambda call: (chosen.append(choose(call).name), choose(call))[1])
    monkeypatch.setattr(dkv, "_run_hopper", lambda *given: (taken.append(1), run(*given))[1])
    check_backward(attention, p, attention.forward(p), slack=2.0)
    assert chosen == [kernel] and taken


@pytest.mark.parametrize(("kernel", "options"), BACKWARD, ids=[f"{name}-{describe(x)}" for name, x in BACKWARD])
def test_backward_of_a_relative_bias(kernel, options, monkeypatch):
    check_gradients(make_relative(6, stats=(), **options), kernel, monkeypatch)


def test_backward_of_a_table_with_minus_infinity(monkeypatch):
    check_gradients(hide_ahead(make_relative(7, stats=(), **MANY)), "stored ds", monkeypatch)


def test_backward_of_a_table_that_all_heads_share(monkeypatch):
    p = make_relative(8, stats=(), **MANY)
    check_gradients(replace(p, relative=p.relative[:1].expand(8, -1)), "stored ds", monkeypatch)


def test_some_heads_at_a_time(monkeypatch):
    monkeypatch.setattr(stored_ds, "SCRATCH_BYTES", 2**24)  # three heads
    monkeypatch.setattr(stored_ds, "FILL", 0.0)
    check_gradients(make_relative(9, stats=(), **MANY | dict(g=8)), "stored ds", monkeypatch)


def test_a_tape_reads_the_new_table(monkeypatch):
    """Calls of one kind with other tables: the third and fourth are replays."""
    monkeypatch.undo()
    for seed in range(4):
        p = make_relative(20 + seed, stats=(), **MANY)
        check_backward(attention, p, check_forward(attention, p, slack=2.0), slack=2.0)


KEY_BIAS = [
    dict(causal=True, **MANY),
    dict(causal=True, sharp=12.0, **MANY),
    dict(**FEW),
    dict(causal=True, left=150, temperature=True, **MANY),
    dict(lengths=True, **MANY),
    dict(causal=True, **MANY | dict(d=64, e=64)),
]


@pytest.mark.parametrize("hides", [False, True], ids=["shown", "some-hidden"])
@pytest.mark.parametrize("options", KEY_BIAS, ids=describe)
def test_statistics_with_a_bias_per_key(options, hides):
    p = make(10, device="cuda", dtype=torch.bfloat16, stats=ALL, **options)
    p = with_biases(p, 10, ("key",), hides)
    assert registry.choose(p).name == "hopper", registry.describe(p)
    check_forward(attention, p, slack=2.0)


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_statistics_with_a_large_bias_per_key(offset):
    """Logits of 300, of which a difference of Σu and 1 must lose no digits: flat, sharp and nearly one-hot rows."""
    for sharp in (0.3, 3.0, 30.0):
        p = make(11, device="cuda", dtype=torch.bfloat16, stats=ALL, causal=True, sharp=sharp, **MANY)
        p = with_biases(p, 11, ("key",))
        p = replace(p, bias=(p.bias[:, :, :1] + offset).expand(p.bias.shape))
        assert registry.choose(p).name == "hopper", registry.describe(p)
        check_forward(attention, p, slack=4.0)


@pytest.mark.parametrize("name", ["alibi", "forgetting", "relative"])
def test_public_biases_take_hopper_with_statistics(name):
    generator = torch.Generator().manual_seed(12)
    q, k, v = (torch.randn(1, 8, 1024, 128, generator=generator).bfloat16().cuda().requires_grad_() for _ in range(3))
    gates = torch.nn.functional.logsigmoid(torch.randn(1, 8, 1024, generator=generator) + 4.0).cuda()
    table = torch.randn(8, 2047, generator=generator).cuda().requires_grad_()
    given = dict(
        alibi=regard.bias.alibi(8), forgetting=regard.bias.forgetting(gates), relative=regard.bias.relative(table)
    )[name]
    options = dict(is_causal=True, return_stats=True)
    assert "kernel hopper" in regard.attention_path(q, k, v, given, **options).reason
    out, stats = regard.attention(q, k, v, given, **options)
    truth, _, exact = regard.reference.attention(q, k, v, given.dense(q, 1024), **options)
    assert (out.double() - truth).norm() <= 2.4e-2 * truth.norm()
    rounding = 2.0**-22 * 512 if name == "alibi" else 0.0  # of slope·j, up to 512, which is added before −slope·i is
    for statistic, ours in stats.items():
        size = exact[statistic].abs() + 10 * FLOOR[statistic]
        error = (ours.double() - exact[statistic]).abs()
        assert (error <= 2e-3 * size + rounding).all(), (statistic, float((error / size).max()))
    do = torch.randn(out.shape, generator=generator).cuda()
    wanted = [q, k, v] + ([table] if name == "relative" else [])
    ours = torch.autograd.grad((out * do).sum(), wanted)
    for mine, right in zip(ours, torch.autograd.grad((truth * do).sum(), wanted), strict=True):
        assert (mine.double() - right.double()).norm() <= 2.4e-2 * right.double().norm()
