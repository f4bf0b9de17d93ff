"""Intervals, biases that are vectors and tile maps on real shapes, compiled, against dense float64 on the same GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_data import Poisoned, make, relative
from interval_data import check_backward, check_forward, find_truth, make_interval, with_biases

from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.backward import bias
from regard._backends.gpu.attention.masks import dense as dense_mask
from regard._backends.gpu.attention.masks import tables

pytestmark = pytest.mark.filterwarnings("default")
SHAPE = dict(b=2, h=4, g=2, m=1000, n=1000, d=128, e=128, dtype=torch.bfloat16, device="cuda")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (attention, dense_mask, tables, bias):
        monkeypatch.setattr(module, "torch", Poisoned())


def with_interval(problem, kind, seed=0):
    (b, h, m, _), n = problem.q.shape, problem.k.shape[2]
    return dataclasses.replace(problem, interval=make_interval(kind, b, h, m, n, seed, "cuda"))


def check(problem):
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("kind", ["documents", "full documents", "prefix"])
def test_intervals_with_statistics(kind):
    check(with_interval(make(1, **SHAPE), kind))


def test_intervals_of_every_head():
    check(with_interval(make(2, **SHAPE, stats=()), "scattered"))


def test_long_documents():
    long = SHAPE | dict(b=1, h=2, g=1, m=4096, n=4096)
    check(with_interval(make(3, **long, stats=()), "documents"))


def test_intervals_of_a_threshold_map():
    check(with_interval(make(4, "entmax15", **SHAPE, stats=("entropy", "visible_keys")), "documents"))


@pytest.mark.parametrize("held", [{}, dict(left=640, right=0)], ids=["bare", "held"])
@pytest.mark.parametrize("name", ["entmax15", "sparsemax"])
def test_intervals_of_threshold_maps_in_narrow_heads(name, held):
    """Triton 3.6 did not compile the bare call with 4 warps. Held: in a window, as documents of known length are."""
    check(with_interval(make(4, name, **SHAPE | dict(d=64, e=64), **held, stats=()), "documents"))


@pytest.mark.parametrize("hides", [False, True])
def test_a_key_bias(hides):
    wide = SHAPE | dict(m=1024, n=1024)
    check(with_biases(make(5, **wide, causal=True, stats=("visible_keys", "first_key_mass")), 1, ("key",), hides))


def test_a_row_bias_and_a_relative_one():
    check(with_biases(make(6, **SHAPE | dict(d=64, e=64), stats=statistics.NAMES[:4]), 2, ("row", "relative")))


RELATIVE = [
    ("entmax15", dict()),
    ("entmax15", dict(d=64, e=64, causal=True)),
    ("sigmoid", dict(lengths=True)),
    ("softmax", dict(d=64, e=64)),
    ("softmax", dict(d=64, e=64, causal=True, m=300, n=777)),
    ("softmax", dict(d=32, e=32, b=64, m=49, n=49)),
    ("softmax", dict(softcap=20.0)),
    ("softmax", dict(d=256, e=256)),
    ("softmax", dict(dtype=torch.float32, d=64, e=64)),
]


@pytest.mark.parametrize(("name", "options"), RELATIVE, ids=str)
def test_a_relative_bias_in_the_plain_kernels(name, options):
    """Each takes a plain kernel in one direction at least: by its map, head width, dtype or number of queries."""
    for seed, stats in enumerate(((), statistics.NAMES)):
        check(with_biases(make(11 + seed, name, **SHAPE | options, stats=stats), seed, ("relative",)))


@pytest.mark.parametrize("kind", ["padding", "scattered"])
def test_dense_masks(kind):
    problem = make(7, **SHAPE, stats=("visible_keys", "entropy", "first_key_mass"))
    shown = (torch.arange(1000) < torch.tensor([1000, 300])[:, None])[:, None, None].expand(2, 1, 1000, 1000).clone()
    if kind == "scattered":
        coarse = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
        shown &= coarse.repeat_interleave(125, 2).repeat_interleave(125, 3)
        shown[:, :, 17] = False
    check(dataclasses.replace(problem, mask=shown.cuda().expand(2, 4, 1000, 1000)))


def test_decode_after_left_padding():
    few = SHAPE | dict(m=2, n=4096)
    problem = make(8, **few)
    lo = torch.tensor([0, 1500])[:, None, None].expand(2, 4, 2)
    rows = torch.stack([lo, torch.tensor([4095, 4096]).expand(2, 4, 2), torch.tensor([4094, 4095]).expand(2, 4, 2)])
    problem = dataclasses.replace(problem, interval=rows.to(torch.int32).cuda())
    assert registry.choose(problem).name == "decode"
    check_forward(attention, problem, slack=2.0)


def test_a_tape_reads_the_new_tensors():
    """Calls of one kind with other intervals and biases: the third and fourth are replays."""
    for seed in range(4):
        problem = with_biases(make(9, **SHAPE | dict(m=256, n=256), stats=()), seed, ("key", "row"))
        problem = with_interval(problem, "scattered", seed)
        answer = attention.forward(problem)
        assert relative(answer.o, find_truth(problem)[0]) < 2.4e-2, seed


def test_hidden_keys_may_hold_nan():
    problem = with_interval(make(10, **SHAPE | dict(b=1), stats=()), "cache")
    rows = problem.interval.clone()
    rows[0], rows[1] = rows[0].clamp_min(300), rows[1].clamp_max(700)
    problem = dataclasses.replace(problem, interval=rows)
    hidden = torch.ones(1000, 1, dtype=torch.bool, device="cuda")
    hidden[300:700] = False
    spoilt = [x.masked_fill(hidden, math.nan) for x in (problem.k, problem.v)]
    found = attention.forward(dataclasses.replace(problem, k=spoilt[0], v=spoilt[1]))
    assert torch.equal(found.o, attention.forward(problem).o)
