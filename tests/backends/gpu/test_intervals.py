"""Intervals, row biases, relative biases and tile maps under Triton's interpreter, against dense float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, make
from interval_data import KINDS, check_backward, check_forward, find_truth, make_interval, with_biases
from rows_data import FUSED

from regard._backends.gpu.attention import config, limits, partial, registry
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.backward import bias
from regard._backends.gpu.attention.forward import decode
from regard._backends.gpu.attention.masks import dense as dense_mask
from regard._backends.gpu.attention.masks import tables

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy overflows where a GPU does too
]
SMALL = dict(b=1, h=2, g=1, m=21, n=37)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (attention, dense_mask, tables, bias, decode):
        monkeypatch.setattr(module, "torch", Poisoned())


def check(problem, slack=1.0):
    check_backward(attention, problem, check_forward(attention, problem, slack), slack)


def with_interval(problem, kind, seed=0):
    (b, h, m, _), n = problem.q.shape, problem.k.shape[2]
    return dataclasses.replace(problem, interval=make_interval(kind, b, h, m, n, seed))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("softmax", kind) for kind in KINDS), *(("entmax15", kind) for kind in ("documents", "left padding", "cache"))],
)
def test_intervals(name, kind):
    check(with_interval(make(1, name, **SMALL | dict(b=2)), kind))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", [name for name in FUSED if name not in ("softmax", "entmax15")])  # those above
def test_every_normalizer(name):
    check(with_interval(make(2, name, **SMALL), "scattered"))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "options",
    [dict(causal=True), dict(left=4, right=9), dict(lengths=True, b=2), dict(temperature=True, softcap=2.0),
     dict(sink=True), dict(mask=True), dict(bias="b"), dict(scale=-0.4), dict(sharp=10.0), dict(m=70, n=90)],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_intervals_beside_other_options(options):
    check(with_interval(make(3, **SMALL | options), "scattered", seed=5))


def test_keys_that_nobody_sees_may_hold_nan():
    problem = make(4, **SMALL | dict(m=40, n=48))
    lo = torch.arange(40) // 8 * 10
    rows = torch.stack([lo, (lo + 6).clamp_max(48), lo]).to(torch.int32)[:, None, None].expand(3, 1, 2, 40)
    problem = dataclasses.replace(problem, interval=rows)
    clean = check_forward(attention, problem)
    do = torch.ones_like(clean.o)
    expected = attention.backward(problem, clean, attention.Upstream(do))
    seen = torch.zeros(48, dtype=torch.bool)
    for first in lo.unique().tolist():
        seen[first : first + 6] = True
    hidden = ~seen[:, None]
    spoilt = dataclasses.replace(
        problem, k=problem.k.masked_fill(hidden, math.nan), v=problem.v.masked_fill(hidden, math.nan)
    )
    answer = attention.forward(spoilt)
    assert torch.equal(answer.o, clean.o) and torch.equal(answer.stats, clean.stats)
    assert torch.equal(attention.backward(spoilt, answer, attention.Upstream(do)).q, expected.q)


ALL_BIASES = "key", "row", "relative"


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "names"),
    [("softmax", ("key",)), ("softmax", ("row",)), ("softmax", ("relative",)), ("softmax", ALL_BIASES),
     ("entmax15", ALL_BIASES), ("sigmoid", ALL_BIASES)],
)  # fmt: skip
def test_biases(name, names):
    check(with_biases(make(6, name, **SMALL, causal=True), 1, names))


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "relu"])
def test_biases_that_hide(name):
    check(with_biases(make(7, name, **SMALL | dict(b=2), left=30), 2, ("key", "row", "relative"), hides=True))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "options",
    [dict(temperature=True), dict(softcap=2.0), dict(mask=True), dict(sink=True, lengths=True, b=2), dict(m=1),
     dict(m=70, n=33), dict(dtype=torch.bfloat16)],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_biases_beside_other_options(options):
    check(with_biases(make(8, **SMALL | options), 3))


def test_biases_beside_an_interval():
    check(with_interval(with_biases(make(9, **SMALL | dict(b=2)), 4, hides=True), "documents"))


@pytest.mark.parametrize("side", ["right", "left", "middle"])
def test_a_key_bias_that_pads(side):
    """−inf at either end cuts the keys; between them it masks every tile."""
    problem = make(10, **SMALL | dict(b=2, n=60))
    offset = torch.zeros(2, 1, 1, 60)
    offset[0, ..., dict(right=slice(40, 60), left=slice(0, 33), middle=slice(20, 41))[side]] = -math.inf
    offset[1] = -math.inf
    check(dataclasses.replace(problem, bias=offset.expand(2, 2, 21, 60)))


def test_a_key_bias_is_read_as_a_vector():
    problem = with_biases(make(11, **SMALL), 5, ("key",))
    opt = config.options(problem)
    assert opt.bias.ptr is None and opt.key_bias.ptr.shape == (1, 2, 37)
    matrix = config.options(dataclasses.replace(problem, bias=problem.bias.contiguous()))
    assert matrix.key_bias.ptr is None and matrix.bias.ptr.shape == (1, 2, 21, 37)


@pytest.mark.parametrize("seed", range(2))
def test_tile_map_of_a_mask(seed):
    """Full, partial and empty tiles, and each row's first key, against the mask itself."""
    problem = make(seed, b=2, h=2, g=1, m=40, n=70, causal=seed == 1)
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 3, (2, 1, 3, 5), generator=generator).repeat_interleave(16, 2).repeat_interleave(16, 3)
    shown = ((coarse == 1) | ((coarse == 2) & (torch.rand(2, 1, 48, 80, generator=generator) < 0.5)))[..., :40, :70]
    problem = dataclasses.replace(problem, mask=shown.expand(2, 2, 40, 70))
    visible = shown & torch.ones(40, 70, dtype=torch.bool).tril() if problem.causal else shown
    constants, _ = config.config_of(problem, "forward_online")
    for keys_first in (False, True):
        table = dense_mask.add_tile_map(problem, constants, config.options(problem), keys_first).tiles
        padded = torch.nn.functional.pad(visible[:, 0].mT if keys_first else visible[:, 0], (0, 16, 0, 16))
        for b in range(2):
            for block in range(table.blocks // 2):
                full, partly = table.counts.ptr[b, block].tolist()
                entries = table.lists.ptr[b, block].tolist()
                for at in range(table.tiles // 2):
                    tile = padded[b, block * 16 : block * 16 + 16, at * 16 : at * 16 + 16]
                    whole = tile[: 40 - block * 16].all() if not keys_first else tile.all()
                    listed = (
                        at * 16 in entries[:full],
                        at * 16 in entries[table.tiles // 2 - partly : table.tiles // 2],
                    )
                    assert listed == (bool(whole), bool(tile.any() and not whole)), (keys_first, b, block, at)
        if not keys_first:
            first, count = table.rows.ptr.unbind(-1)
            assert torch.equal(count, visible[:, 0].sum(-1).to(torch.int32))
            some = count > 0
            assert torch.equal(first[some], visible[:, 0].int().argmax(-1)[some].to(torch.int32))
    check(problem)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("softmax", "padding"), ("softmax", "per head"), ("softmax", "one row"), ("entmax15", "per head"),
     ("sigmoid", "one row")],
)  # fmt: skip
def test_masks(name, kind):
    problem = make(12, name, **SMALL | dict(b=2, n=50))
    lengths = torch.tensor([50, 18])
    shown = (torch.arange(50) < lengths[:, None])[:, None, None]
    if kind == "per head":
        shown = torch.rand(2, 2, 21, 50, generator=torch.Generator().manual_seed(0)) < 0.7
    if kind == "one row":
        shown = shown & (torch.arange(21) != 4)[None, None, :, None]
    check(dataclasses.replace(problem, mask=shown.expand(2, 2, 21, 50)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("softmax", "cache"), ("softmax", "left padding"), ("softmax", "scattered"), ("sigmoid", "cache")],
)
def test_decode(name, kind, monkeypatch):
    monkeypatch.setattr(decode, "KEYS", 33)
    monkeypatch.setattr(decode, "SHORTEST", 8)
    problem = with_interval(make(13, name, b=2, h=4, g=2, m=3, n=50), kind)
    problem = with_biases(problem, 6, ("row",))
    assert registry.choose(problem).name == "decode"
    check_forward(attention, problem)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_a_part_of_the_keys(name):
    """lo, hi and position count in the whole sequence."""
    problem = with_interval(make(14, name, b=1, h=2, g=1, m=64, n=64), "documents")
    queries, keys = slice(16, 64), slice(16, 40)
    part = dataclasses.replace(
        problem, q=problem.q[:, :, queries], k=problem.k[:, :, keys], v=problem.v[:, :, keys],
        interval=problem.interval[..., queries], first_query=16, first_key=16, queries=64, stats=(),
    )  # fmt: skip
    found = partial.forward(part)
    shown = torch.zeros(64, dtype=torch.bool)
    shown[keys] = True
    o, _ = find_truth(dataclasses.replace(problem, mask=shown.expand(1, 2, 64, 64)))
    torch.testing.assert_close(found.o.double(), o[:, :, queries], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["row_bias", "relative", "interval"])
def test_kernels_that_cannot_take_them_say_so(option):
    """Of the faster kernels, in the words of the option's declaration; the last of each family takes everything."""
    problem = with_interval(with_biases(make(15, stats=()), 7, ("row", "relative")), "documents")
    others = {name: None for name in ("row_bias", "relative", "interval") if name != option}
    problem = dataclasses.replace(problem, **others)
    reason = limits.find_option(problem, "bias", *others, option)
    assert reason
    assert registry.choose(problem).name == "online"
    if option == "relative":
        few = dataclasses.replace(problem, q=problem.q[:, :, :1], relative=problem.relative[:, -37:])
        long = few.k.repeat_interleave(60, 2)
        assert decode.supports(dataclasses.replace(few, k=long, v=long)) == reason
