"""The Hopper forward against the float64 oracle: every kind of call it takes, and the calls it leaves to others."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from attention_data import check_forward, make
from hopper_data import SHAPES, make_taken, poison, take_warpgroups

import regard
from regard import reference, statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.hopper import launch as hopper

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.fixture(autouse=True, params=["one", "several"])
def warpgroups(request, monkeypatch):
    take_warpgroups(monkeypatch, request.param)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_statistics(d, causal):
    for seed, sizes in enumerate(SHAPES):
        for sharp in (0.02, 1.0, 12.0):
            check_forward(attention, make_taken(seed, d=d, e=d, causal=causal, sharp=sharp, **sizes), slack=2.0)


@pytest.mark.parametrize("d", [64, 128])
def test_without_statistics(d):
    """Heads of 64 take blocks of 192 queries, whose three warpgroups see different numbers of tiles."""
    for causal in (True, False):
        for seed, sizes in enumerate(SHAPES):
            check_forward(attention, make_taken(seed, d=d, e=d, causal=causal, sharp=3.0, stats=(), **sizes), slack=2.0)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_whole_tiles(d):
    for causal in (True, False):
        for stats in (statistics.NAMES, ()):
            check_forward(
                attention, make_taken(3, b=1, h=2, g=1, m=1024, n=1024, d=d, e=d, causal=causal, stats=stats), 2.0
            )


@pytest.mark.parametrize(("m", "n"), [(300, 1024), (1000, 512)])
def test_whole_tiles_of_other_lengths(m, n):
    """Full rows begin with the tile on the diagonal, or with the last tile if they lie beyond all keys."""
    check_forward(attention, make_taken(5, b=1, h=4, g=2, m=m, n=n, d=64, e=64, sharp=3.0), slack=2.0)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("m", "n"), [(100, 100), (197, 197), (640, 650), (130, 900), (900, 130)])
def test_ragged_full_rows(m, n, d):
    """Rows of a length that is no multiple of a tile: the tile on the diagonal first, then the last one."""
    for lengths in (False, True):
        problem = make_taken(6, b=4, h=4, g=2, m=m, n=n, d=d, e=d, lengths=lengths, sharp=3.0)
        assert hopper.make_config(problem).RAGGED
        check_forward(attention, problem, slack=2.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_moments(d, causal):
    for m, n in ((1000, 1000), (300, 777), (777, 300)):
        for sharp in (0.02, 1.0, 12.0):
            problem = make_taken(m, b=1, h=4, g=2, m=m, n=n, d=d, e=d, causal=causal, sharp=sharp)
            problem.k[0, 1] += 0.5
            check_forward(attention, problem, slack=2.0)


@pytest.mark.parametrize("causal", [True, False])
def test_imprecise_moments_are_recomputed(causal):
    """Keys with a large component that some queries do not see, and keys and queries of very different sizes."""
    problem = make_taken(21, b=1, h=4, g=2, m=700, n=700, d=64, e=64, causal=causal)
    problem.q[:, :2, :, 0] = 0.0
    problem.k[:, 0, :, 0] += 300.0
    problem.q[:, 2:] *= 2.0**-80
    problem.k[:, 1] *= 2.0**80
    check_forward(attention, problem, slack=2.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_persistent_programs(d, causal, monkeypatch):
    """Persistent programs give the same bits as one program per block."""
    for length, places in (
        (1536, 4),
        (1360, 2) if causal else (1500, 4),
    ):  # odd, or cut
        for stats in (statistics.NAMES, ()):
            problem = make_taken(23, b=1, h=4, g=2, m=length, n=length, d=d, e=d, causal=causal, sharp=2.0, stats=stats)
            alone = attention.forward(problem)
            with monkeypatch.context() as patch:
                patch.setattr(hopper, "sm_count", lambda device, places=places: places)
                assert hopper.make_config(problem).PERSISTENT
                ahead = check_forward(attention, problem, slack=2.0)
            assert all(torch.equal(getattr(alone, x), getattr(ahead, x)) for x in ("o", "shift", "z", "stats"))


@pytest.mark.parametrize("name", ["softmax1", "sigmoid", "relu", "softpick"])
def test_other_maps_in_persistent_programs(name, monkeypatch):
    problem = make_taken(24, name, b=1, h=4, g=2, m=1536, n=1536, d=64, e=64, causal=True, stats=())
    monkeypatch.setattr(hopper, "sm_count", lambda device: 4)
    assert hopper.make_config(problem).PERSISTENT
    check_forward(attention, problem, slack=2.0)


OTHERS = (
    dict(name="softmax", sink=True, temperature=True, causal=True),
    dict(name="softmax1", causal=False),
    dict(name="softmax", dtype=torch.float16, causal=True),
    dict(name="sigmoid", stats=(), causal=True),
    dict(name="relu", stats=(), causal=True),
    dict(name="softpick", stats=(), causal=True),
)


@pytest.mark.parametrize("options", OTHERS, ids=lambda options: options["name"])
def test_other_maps_and_options(options):
    for seed, sizes in enumerate(SHAPES[:2]):
        check_forward(attention, make_taken(seed, d=64, e=64, **sizes, **options), slack=2.0)


@pytest.mark.parametrize("bias", [-8, -14, -20])
def test_small_sigmoids_keep_their_digits(bias):
    """Four weights share a reciprocal and may differ by many powers of two."""
    for seed, sizes in enumerate(SHAPES):
        check_forward(
            attention, make_taken(seed, f"sigmoid(bias={bias})", d=64, e=64, stats=(), causal=True, **sizes), 2.0
        )


def largest_row_error(problem):
    """Largest relative error of a row of o."""
    answer = attention.forward(problem).o.double()
    truth = reference.of_problem(problem)[0].double()
    return float(((answer - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-9)).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
def test_every_sigmoid_method(d, dtype):
    """Biases and scales that lead to each of `logistic`'s three methods."""
    wide = dtype == torch.bfloat16  # in float16 small weights are subnormal
    for bias in (0, -3, -6, -9, 5) if wide else (0, -3, 5):
        for sharp in (0.05, 1.0, 6.0) if wide else (0.05, 1.0):
            options = dict(b=1, h=4, g=2, m=1000, n=1000, d=d, e=d, dtype=dtype, stats=(), causal=True, sharp=sharp)
            problem = make_taken(26, f"sigmoid(bias={bias})", **options)
            problem.q[0, 1, ::3] *= 4.0
            problem.k[0, 0, 100:400] -= 1.0
            assert largest_row_error(problem) < (8e-3 if wide else 2e-3)


def test_error_of_tanh_approx():
    x = torch.linspace(-40.0, 40.0, 1 << 22, device="cuda")
    y = torch.full_like(x, math.nan)
    half_tanh[(x.numel() // 1024,)](x, y, 1024)
    assert float((y.double() - torch.sigmoid(2.0 * x.double())).abs().max()) < 4.5e-6


@triton.jit
def half_tanh(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
    tl.store(y + i, 0.5 + 0.5 * t)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["softmax", "softmax1", "softpick"])
def test_fixed_shift(name, d, causal, monkeypatch):
    """Large calls keep the shift of their first tile; rows that overflow are recomputed."""
    monkeypatch.setattr(hopper, "MIN_FIXED_SHIFT_SCORES", 0)
    for seed, sizes in enumerate(SHAPES):
        problem = make_taken(seed, name, d=d, e=d, causal=causal, sharp=3.0, stats=(), **sizes)
        assert hopper.make_config(problem).FIXED_SHIFT
        assert largest_row_error(problem) < 1e-2
        problem.k[:, :1, 0] *= 60.0  # keys are visited from the last to the first
        problem.k[:, 1:, 1] *= 1000.0
        assert largest_row_error(problem) < 1e-2
    assert not hopper.has_fixed_shift(make_taken(28, d=d, e=d, causal=causal, **SHAPES[0]))  # not with statistics


def test_fixed_shift_with_other_options(monkeypatch):
    monkeypatch.setattr(hopper, "MIN_FIXED_SHIFT_SCORES", 0)
    problem = make_taken(27, d=64, e=64, causal=True, stats=(), sink=True, temperature=True, **SHAPES[0])
    problem.k[:, :, 3] *= 60.0
    assert largest_row_error(problem) < 1e-2
    problem.q[0, 1, 500, 7] = math.nan
    nan_rows = attention.forward(problem).o.isnan().any(-1).nonzero()
    assert nan_rows.tolist() == [[0, 1, 500]]


@pytest.mark.parametrize("name", ["sigmoid", "softpick"])
def test_a_row_of_nan_stays_alone(name):
    problem = make_taken(4, name, d=64, e=64, stats=(), causal=True, **SHAPES[0])
    problem.q[0, 1, 500, 7] = math.nan
    nan_rows = attention.forward(problem).o.isnan().any(-1).nonzero()
    assert nan_rows.tolist() == [[0, 1, 500]]


def test_a_mean_that_dwarfs_the_deviation():
    problem = make_taken(7, b=1, h=4, g=2, m=500, n=900, d=64, e=64, causal=True)
    problem.k += 6.0
    check_forward(attention, problem, slack=2.0)


def test_a_maximum_that_comes_last_and_far_above():
    for causal in (True, False):
        problem = make_taken(9, b=1, h=4, g=2, m=1000, n=1000, d=128, e=128, causal=causal)
        problem.k[:, :, 0] *= 60.0  # visited last: every sum must be rescaled by a lot
        check_forward(attention, problem, slack=2.0)


def test_only_the_statistics_asked_for():
    for names in (("max_logit",), ("distance", "gradient_gain")):
        check_forward(attention, make_taken(11, **SHAPES[0], d=64, e=64, causal=True, stats=names), slack=2.0)


def test_same_inputs_same_bits():
    problem = make_taken(13, **SHAPES[0], d=128, e=128, causal=True)
    first, *others = (attention.forward(problem) for _ in range(4))
    for other in others:
        assert torch.equal(first.o, other.o) and torch.equal(first.stats, other.stats) and torch.equal(first.z, other.z)


def test_keys_that_no_query_sees_are_not_read():
    problem = make_taken(15, b=1, h=4, g=2, m=200, n=401, d=64, e=64, causal=True)
    clean = attention.forward(problem)
    for x in (problem.k, problem.v):
        x[:, :, 200:] = math.nan
    dirty = attention.forward(problem)
    assert torch.equal(clean.o, dirty.o) and torch.equal(clean.stats, dirty.stats)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [300, 700])
def test_a_row_with_a_nan_logit_says_so_in_every_statistic(n, causal):
    problem = make_taken(16, b=1, h=4, g=2, m=n, n=n, d=64, e=64, causal=causal)
    clean = attention.forward(problem).stats
    problem.q[0, 0, 7] = math.nan
    if causal:
        problem.k[0, 1, 200] = math.nan
    stats = attention.forward(problem).stats
    _, truths = reference.of_problem(problem)
    assert torch.equal(stats.isnan(), truths.isnan())
    assert torch.equal(stats[~stats.isnan()], clean[~stats.isnan()])


def test_heads_side_by_side():
    """q, k, v as transposed views of [B, N, H, D], which the kernel reads in place."""
    problem = make_taken(17, b=2, h=4, g=2, m=333, n=333, d=64, e=64, causal=True)
    truth = attention.forward(problem)
    for name in ("q", "k", "v"):
        x = getattr(problem, name)
        setattr(problem, name, x.transpose(1, 2).contiguous().transpose(1, 2))
    assert registry.choose(problem).name == "hopper" and torch.equal(truth.o, attention.forward(problem).o)


def test_what_it_leaves_to_others():
    sizes = dict(SHAPES[0], d=64, e=64, dtype=torch.bfloat16, device="cuda")
    for options in (dict(mask=True), dict(bias="b"), dict(dropout=0.1)):
        assert hopper.supports(make(19, **sizes, **options)) is not None
    for widths in (dict(d=60), dict(d=264, e=264), dict(e=128)):
        assert hopper.supports(make(19, **sizes | widths)) is not None
    assert hopper.supports(make(19, "sigmoid", **sizes, stats=statistics.NAMES)) is not None
    assert registry.choose(make(19, "entmax15", **sizes)).name != "hopper"
    assert hopper.supports(dataclasses.replace(make(19, **sizes), scale=-1.0)) is not None


def test_the_path_says_so():
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(256, 256, device="cuda") > 0.5
    for options in (dict(return_stats=True), dict(softcap=3.0), dict(window=(5, 5), softcap=3.0)):
        assert "kernel hopper" in regard.attention_path(q, q, q, is_causal="window" not in options, **options).reason
    assert "kernel hopper" not in regard.attention_path(q, q, q, attn_mask=mask, softcap=3.0).reason
