"""The Hopper forward on other widths, soft caps, windows, key lengths and short rows, against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch
from attention_data import FLOOR, check_backward, check_forward
from hopper_data import SHAPES, make_taken, poison, take_warpgroups

from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.hopper import launch as hopper

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
WIDTHS = ((8, 8), (40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (128, 64), (192, 128), (200, 136), (256, 256))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.fixture(autouse=True, params=["one", "several"])
def warpgroups(request, monkeypatch):
    take_warpgroups(monkeypatch, request.param)


@pytest.mark.parametrize(("d", "e"), WIDTHS)
def test_other_widths(d, e):
    """Columns beyond a head's width are loaded as zeros and not stored."""
    for seed, (causal, stats) in enumerate(((True, statistics.NAMES), (False, statistics.NAMES), (True, ()))):
        sizes = SHAPES[seed % 2]
        problem = make_taken(seed, d=d, e=e, causal=causal, sharp=(1.0, 12.0)[seed % 2], stats=stats, **sizes)
        check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("name", ["sigmoid", "softpick", "relu"])
@pytest.mark.parametrize(("d", "e"), [(80, 80), (192, 128), (256, 256)])
def test_other_maps_of_other_widths(name, d, e):
    check_forward(attention, make_taken(31, name, d=d, e=e, causal=True, stats=(), **SHAPES[0]), slack=2.0)


# a cap c rounds logits by 1e-7·c, which shows relative to logits of 1e-2
CAPPED = FLOOR | dict(max_logit=0.1, logsumexp=0.1)  # which are equal in a row of one key


@pytest.mark.parametrize("stats", [statistics.NAMES, ()], ids=["statistics", "plain"])
@pytest.mark.parametrize("softcap", [2.0, 50.0])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_soft_cap(d, softcap, stats):
    for seed, sharp in enumerate((0.05, 1.0, 40.0)):
        options = dict(causal=seed != 1, softcap=softcap, stats=stats, temperature=seed == 1)
        problem = make_taken(seed, d=d, e=d, sharp=sharp, **options, **SHAPES[seed % 2])
        check_backward(attention, problem, check_forward(attention, problem, slack=2.0, floor=CAPPED), slack=2.0)


@pytest.mark.parametrize("stats", [statistics.NAMES, ()], ids=["statistics", "plain"])
@pytest.mark.parametrize("left", [0, 5, 127, 128, 300])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (256, 256)])
def test_windows(d, e, left, stats):
    """Causal windows, also where the last queries see no key; hidden values may be NaN."""
    for seed, sizes in enumerate((SHAPES[0], SHAPES[1], SHAPES[2])):
        problem = make_taken(seed, d=d, e=e, causal=True, left=left, sharp=2.0, stats=stats, **sizes)
        check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("name", ["sigmoid", "softpick", "softmax1"])
def test_windows_of_other_maps(name):
    for lengths in (False, True):
        options = dict(causal=True, left=200, stats=(), lengths=lengths)
        check_forward(attention, make_taken(32, name, d=64, e=64, **options, **SHAPES[0]), slack=2.0)


@pytest.mark.parametrize("stats", [statistics.NAMES, ()], ids=["statistics", "plain"])
@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(causal=True, left=150)], ids=str)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (80, 80), (192, 128)])
def test_key_lengths(d, e, options, stats):
    """Lengths of zero, half, all and more keys; what lies beyond them may be NaN."""
    for m, n in ((777, 777), (300, 1001)):
        problem = make_taken(33, b=4, h=4, g=2, m=m, n=n, d=d, e=e, lengths=True, sharp=2.0, stats=stats, **options)
        clean = check_forward(attention, problem, slack=2.0)
        check_backward(attention, problem, clean, slack=2.0)
        for entry, length in enumerate(problem.key_lengths.tolist()):
            problem.k[entry, :, length:] = math.nan
            problem.v[entry, :, length:] = math.nan
        dirty = attention.forward(problem)
        assert all(torch.equal(getattr(clean, x), getattr(dirty, x)) for x in ("o", "shift", "z", "stats"))


def test_a_nan_before_every_window_stays_hidden():
    problem = make_taken(34, b=1, h=4, g=2, m=1000, n=1000, d=128, e=128, causal=True, left=100, stats=())
    clean = attention.forward(problem).o
    problem.v[:, :, :400] = math.nan
    assert torch.equal(clean[:, :, 640:], attention.forward(problem).o[:, :, 640:])


@pytest.mark.parametrize("queries", [64, 197])
def test_short_rows(queries):
    """Blocks of at most two warpgroups: three would compute many rows that do not exist."""
    for stats in (statistics.NAMES, ()):
        problem = make_taken(35, b=2, h=4, g=4, m=queries, n=queries, d=64, e=64, stats=stats)
        assert hopper.make_config(problem).BM <= 128
        check_forward(attention, problem, slack=2.0)
