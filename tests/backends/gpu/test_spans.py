"""The spans of queries, and the order in which the Hopper forward visits the key tiles, without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, make
from triton.tools.tensor_descriptor import TensorDescriptor

from regard._backends.gpu.attention import config
from regard._backends.gpu.attention.backward import dkv, stored_ds
from regard._backends.gpu.attention.backward.stored_ds import backward_product
from regard._backends.gpu.attention.hopper import ring, spans
from regard._backends.gpu.launcher import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled")
BN = 128


def make_problem(case: str):
    """A problem whose queries see documents, windows, anything, or nothing at times."""
    m, n = (900, 1000) if case in ("wide", "window", "narrow", "held") else (300, 333)
    p = make(0, b=2, h=2, g=1, m=m, n=n, d=16, e=16, lengths=case == "lengths", causal=case == "causal")
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, n, (2, 2, m), generator=generator)
    last = first + torch.randint(-5, 200, (2, 2, m), generator=generator)
    position = torch.randint(0, n, (2, 2, m), generator=generator)
    if case == "documents":
        start = torch.tensor([0, 70, 71, 200, 300]).repeat_interleave(torch.tensor([70, 1, 129, 100, 0]))
        first, last, position = (x.expand(2, 2, m) for x in (start, torch.arange(m) + 1, torch.arange(m)))
    if case == "wide":
        first, last, position = first % 200, n - first % 150, position % 300 + 400
    if case in ("window", "narrow", "held"):  # held: intervals within a window
        p.left, p.right = (400, 275) if case == "window" else (100, 40)
    if case not in ("window", "narrow"):
        p.interval = torch.stack([first, last.clamp(max=n), position]).int()
    return p


def find_visible(p):
    """(visible [B, H, M, N], position [B, H, M]) of a problem, straight from the definition."""
    i, j = torch.arange(p.q.shape[2])[:, None], torch.arange(p.k.shape[2])
    left, right = p.reach
    visible = torch.ones(*p.q.shape[:3], len(j), dtype=torch.bool)
    position = i[:, 0].expand(p.q.shape[:3])
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right
    if p.key_lengths is not None:
        visible &= j < p.key_lengths[:, None, None, None]
    if p.interval is not None:
        visible &= (j >= p.interval[0][..., None]) & (j < p.interval[1][..., None])
        position = p.interval[2]
    return visible, position


@pytest.fixture(params=["documents", "random", "wide", "window", "narrow", "held", "lengths", "causal"])
def call(request, monkeypatch):
    monkeypatch.setattr(spans, "torch", Poisoned())
    p = make_problem(request.param)
    return p, spans.find_spans(p, config.options(p))


def test_spans_are_the_visible_keys(call):
    p, found = call
    visible, position = find_visible(p)
    m, j = p.q.shape[2], torch.arange(p.k.shape[2])
    rows = found.rows.unflatten(1, (2, found.heads)).expand(3, 2, 2, -1)
    first, last = rows[0, ..., :m, None], rows[1, ..., :m, None]
    assert torch.equal((j >= first) & (j < last), visible)
    assert torch.equal(rows[2, ..., :m], position.int()) and not rows[..., m:].any()
    assert found.rows.shape[-1] == 64 * found.count and found.count % 2 == 0


class Language:
    """The words of Gluon that `divide_tiles` uses, on integers."""

    load = staticmethod(lambda at: at.numbers[at.to])
    cdiv = staticmethod(lambda x, y: -(-x // y))
    minimum, maximum, constexpr = min, max, object


class Pointer:
    def __init__(self, numbers, to=0):
        self.numbers, self.to = numbers, to

    def __add__(self, step):
        return Pointer(self.numbers, self.to + step)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("distance", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_tiles_without_masks_are_seen_whole(call, distance, first):
    """Bare tiles lie inside every row's keys and, with distances, on one side of every position; none is left out."""
    p, found = call
    visible, position = find_visible(p)
    rows = found.rows.unflatten(1, (2, found.heads)).expand(3, 2, 2, -1)
    groups = found.groups.unflatten(0, (2, found.heads)).expand(2, 2, -1, -1)
    words = dict(gl=Language, find_group=lambda numbers, b, h, r0: Pointer(numbers))
    names = {**ring.divide_tiles.fn.__globals__, **words}
    divide = FunctionType(ring.divide_tiles.fn.__code__, names)
    C = SimpleNamespace(BN=BN, NEED=SimpleNamespace(first=first, distance=distance))
    many = 0
    for b in range(2):
        for h in range(2):
            for i0 in range(0, p.q.shape[2], 128):
                pair = groups[b, h, i0 // 64 : i0 // 64 + 2].tolist()
                lowest, keys = min(x[0] for x in pair), max(x[3] for x in pair)
                low = min(lowest, keys) // BN
                count = max(-(-keys // BN) - low, 1)
                base = 7
                work = SimpleNamespace(b=b, h=h, low=low, end=base + count)
                for r0 in (i0, i0 + 64):
                    upper, over, under, rest = divide(base + 1, r0, work, pair[(r0 - i0) // 64], C)
                    assert base + 1 <= upper <= over <= under <= rest <= work.end or count == 1
                    bare = [*range(upper, over), *(range(under, rest) if distance else ())]
                    steps = [(low + work.end - 1 - t) * BN for t in range(base, work.end)]
                    seen = visible[b, h, r0 : r0 + 64]
                    assert not seen[:, : steps[-1]].any() and not seen[:, steps[0] + BN :].any()
                    alive = seen.any(-1)
                    many += len(bare)
                    for t in bare:
                        start = steps[t - base]
                        assert seen[alive, start : start + BN].all() and start + BN <= p.k.shape[2]
                        place = position[b, h, r0 : r0 + 64][alive]
                        if distance:
                            assert (place >= start + BN - 1).all() or (place <= start).all()
                        if first:
                            assert (rows[0, b, h, r0 : r0 + 64][: len(alive)][alive] < start).all()
    assert many > 20 or p.q.shape[2] < 900 or p.left == 100


def test_query_ranges_hold_every_query_that_sees_a_block_of_keys(call):
    p, found = call
    visible, _ = find_visible(p)
    ranges = spans.find_query_ranges(p, found, BN)  # both heads share one key head
    for b in range(2):
        for block, (begin, count, inner, outer) in enumerate(ranges[b, 0].tolist()):
            seen = visible[b, :, :, block * BN : (block + 1) * BN]
            tiles = (seen.any(-1).any(0).nonzero()[:, 0] // 64).tolist() or [0, -1]
            assert (begin, begin + count) == (tiles[0] if count else 0, tiles[-1] + 1), (b, block)
            whole = [seen.shape[-1] == BN and x.shape[1] == 64 and bool(x.all()) for x in seen.split(64, 1)]
            run = range(begin + inner, begin + outer)
            assert 0 <= inner <= outer <= count and all(whole[tile] for tile in run), (b, block)
            assert bool(run) == any(whole) and (run.stop == len(whole) or not run or not whole[run.stop]), (b, block)


@pytest.mark.drawn(4)
@pytest.mark.drawn(5)
@pytest.mark.parametrize("banded", [False, True], ids=["whole", "band"])
def test_dq_of_stored_ds(call, banded):
    """ds that no query sees was never stored: it is NaN, and so are keys that no query sees."""
    p, found = call
    visible, _ = find_visible(p)
    (b, h, m, d), n, generator = p.q.shape, p.k.shape[2], torch.Generator().manual_seed(2)
    band = dkv.find_band(p) if banded else None
    if banded and band is None:
        pytest.skip("no window narrower than the queries")
    width, height = stored_ds.padded_size(p) if banded else (-(-m // 128) * 128, -(-n // 64) * 64)
    ds = torch.randn(b, h, m, n, generator=generator).masked_fill(~visible, math.nan)
    scratch = torch.full((b * h, height, width), math.nan, dtype=torch.float32)
    for j in range(n):
        start = 0 if band is None else j // 128 * 128 - band  # the query of column 0
        rows = range(max(start, 0), min(start + width, m))
        assert not visible[:, :, : rows.start, j].any() and not visible[:, :, rows.stop :, j].any()
        scratch[:, j, rows.start - start : rows.stop - start] = ds[:, :, rows.start : rows.stop, j].flatten(0, 1)
    k = p.k.float().masked_fill(~visible.any(1).any(1)[:, None, :, None], math.nan)
    p = replace(p, q=p.q.float(), k=k, v=p.v.float())
    dq = torch.full((b, h, m, d), math.nan)
    made, how = config.config_of(p, "backward_product")
    made = made._replace(BM=128, BN=64)
    blocks = TensorDescriptor(scratch, list(scratch.shape), list(scratch.stride()), [1, made.BN, made.BM])
    keys = config.describe_blocks(k, made.BN, made.BD, True)
    arguments = config.view(k), keys, blocks, band, config.view(dq), found, config.options(p)
    launch(None, backward_product, -(-m // 128) * b * h, arguments, (made,), **how)
    known = ds.masked_fill(~visible, 0.0).double() @ k.nan_to_num(0.0).double().expand(b, h, n, d)
    assert (dq.double() - p.scale * known).abs().max() <= 1e-4 * known.abs().max()
