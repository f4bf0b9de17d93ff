"""Candidate lists under Triton's interpreter; torch fills the lists, which needs Gluon and a GPU otherwise."""

from __future__ import annotations

import dataclasses
import math

import interval_data
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from attention_data import check_backward, check_forward, make
from interpreter import check_overflow
from key_data import check_keys

from regard._backends.gpu.attention import key_reading, statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.limits import find_option
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._backends.gpu.attention.sparse import top_keys

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
BLOCK, CAP = 32, 16
BYTES = sparse.BLOCK * sparse.CAP * 4 * 8  # of a block's lists
SMALL = dict(b=1, h=2, g=1, d=8, e=8)


def fill(self, kind, bounds, slope, first, programs, opt):
    """Replaces `list_candidates`, entry by entry."""
    p, cap = self.problem, sparse.CAP
    entries = self.entries[: self.counts.shape[0] * 8 * cap].view(-1, cap, BLOCK, 4, 2)
    rows, columns = (p.k, p.q) if self.transposed else (p.q, p.k)
    h, m = rows.shape[1:3]
    blocks = math.ceil(m / BLOCK)
    (left, right), i, j = p.reach, torch.arange(p.q.shape[-2])[:, None], torch.arange(p.k.shape[-2])
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    seen &= j >= i - left if left is not None else True
    seen &= j <= i + right if right is not None else True
    for slot in range(programs):
        block = first + slot
        start = block % blocks * BLOCK if self.transposed else (blocks - 1 - block % blocks) * BLOCK
        head, batch = block // blocks % h, block // blocks // h
        shown = seen if p.key_lengths is None else seen & (j < int(p.key_lengths[batch]))
        if p.interval is not None:
            lo, hi, _ = p.interval[:, batch, head, :, None]
            shown = shown & (j >= lo) & (j < hi)
        for r in range(BLOCK):
            row, held = start + r, slot * BLOCK + r
            lists = [[], [], [], []]
            over = range(p.q.shape[1] // p.k.shape[1]) if self.transposed else (0,)
            for inner in over if row < m else ():
                query = head * len(over) + inner if self.transposed else head
                other = columns[batch, query if self.transposed else head // (p.q.shape[1] // p.k.shape[1])]
                y = other.float() @ rows[batch, head, row].float()
                y, bound = (y - bounds[batch, query], 0.0) if self.transposed else (y, bounds[batch, head, row])
                x, visible = y, shown[:, row] if self.transposed else shown[row]
                if p.bias is not None:
                    x = y = y * p.scale + p.bias[batch, head, row]
                if p.softcap is not None:  # the lists hold products
                    y = p.softcap * torch.tanh(y * p.scale / p.softcap)
                if not self.transposed and bounds[batch, head, start : start + BLOCK].max() == math.inf:
                    visible = visible & False
                if self.below is not None:
                    off, parts = torch.where(visible, y - bound, 0.0), j % 8 // 2
                    low = torch.where(visible & (y <= bound), torch.exp2((y - bound) * slope[batch, head, row]), 0.0)
                    for at, number in enumerate((off, off * off, low)):
                        self.below[held, at] = torch.zeros(4).index_add(0, parts, number)
                for c in torch.nonzero(visible & (y > bound)).flatten().tolist():
                    one = lists[c % 8 // 2]
                    if len(one) < cap - 1:
                        one.append((float(x[c]), inner * p.q.shape[-2] + c))
            for quarter, one in enumerate(lists):
                self.counts[held, quarter] = len(one)
                for at, (y, c) in enumerate(one):
                    entries[slot, at, r, quarter, 0] = y
                    entries.view(torch.int32)[slot, at, r, quarter, 1] = c


@pytest.fixture(autouse=True)
def interpreted_lists(monkeypatch):
    made = sparse.CandidateLists.__init__

    def init(self, p, stats, transposed):
        made(self, p, stats, transposed)
        self.problem = p
        for scratch in (self.entries, self.below):
            if scratch is not None:
                scratch.fill_(math.nan)

    def supports(p, direction):
        backward = find_option(p, "bias", "softcap", "interval") if direction == "backward" else None
        return backward or find_option(p, "mask")

    monkeypatch.setattr(sparse, "supports", supports)
    monkeypatch.setattr(sparse, "describe_rows", lambda x, rows, width: None)
    monkeypatch.setattr(sparse.CandidateLists, "__init__", init)
    monkeypatch.setattr(sparse.CandidateLists, "fill", fill)
    for name, number in dict(BLOCK=BLOCK, CAP=CAP, SPARE=1, CHUNK=3, GROUPS=16).items():
        monkeypatch.setattr(sparse, name, number)


CASES = [
    ("entmax15", dict(causal=True)),
    ("sparsemax", dict(temperature=True, sharp=2.0)),
    ("entmax(alpha=1.7)", dict(left=20, lengths=True, b=2, h=1)),
    ("entmax15", dict(softcap=2.0, causal=True, sharp=3.0)),
    ("sparsemax", dict(softcap=0.5)),
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_lists_give_what_the_oracle_gives(name, options):
    problem = make(1, name, **SMALL | dict(m=40, n=90) | options)
    check_backward(attention, problem, check_forward(attention, problem))


@pytest.mark.parametrize("kind", ["documents", "prefix", "scattered"])
def test_lists_of_intervals(kind, monkeypatch):
    flags = record_flags(monkeypatch)
    problem = make(4, "entmax15", **SMALL | dict(m=40, n=90), sharp=2.0)
    problem = dataclasses.replace(problem, interval=interval_data.make_interval(kind, 1, 2, 40, 90))
    interval_data.check_backward(attention, problem, interval_data.check_forward(attention, problem))
    assert flags[0].sum() == 0


@pytest.mark.parametrize(("name", "hides"), [("entmax15", False), ("entmax(alpha=1.7)", False), ("sparsemax", True)])
def test_lists_beside_a_bias_per_key(name, hides, monkeypatch):
    flags = record_flags(monkeypatch)
    problem = make(5, name, **SMALL | dict(m=40, n=90), sharp=2.0, causal=True)
    problem = interval_data.with_biases(problem, 6, names=("key",), hides=hides)
    interval_data.check_backward(attention, problem, interval_data.check_forward(attention, problem))
    assert bool(flags[0].any()) == hides  # keys that a bias hides between visible ones leave a head to the sweeps


def record_flags(monkeypatch):
    """The flags that the forward calls from now on return."""
    flags, forward = [], sparse.forward
    monkeypatch.setattr(sparse, "forward", lambda *call: flags.append(forward(*call)) or flags[-1])
    return flags


def test_only_failed_rows_are_swept(monkeypatch):
    monkeypatch.setattr(sparse, "CAP", 8)
    flags = record_flags(monkeypatch)
    problem = make(2, "entmax15", **SMALL | dict(b=2, g=2, m=32, n=36), sharp=0.05, stats=())
    problem.q[0] *= 60.0  # few keys have weight; in the other batch entry more of them than a list holds
    check_backward(attention, problem, check_forward(attention, problem))
    assert not flags[0].view(2, -1)[0].all() and flags[0].view(2, -1)[1].all()


def test_lists_longer_than_the_resident_entries(monkeypatch):
    monkeypatch.setattr(sparse, "CAP", 64)
    monkeypatch.setattr(sparse, "CHUNK", 1)
    flags = record_flags(monkeypatch)
    problem = make(3, "entmax15", **SMALL | dict(h=1, m=40, n=220), sharp=0.05)  # every key has weight: 55 to a list
    check_forward(attention, problem)
    assert flags[0].sum() == 0


@pytest.mark.parametrize(
    ("name", "most", "options"),
    [
        ("softmax", 3, dict(causal=True)),
        ("softmax", 8, dict(left=30, lengths=True, b=2, sink=True)),
        ("entmax15", 5, dict(temperature=True, sharp=2.0)),
        ("sigmoid", 1, dict(right=5)),
    ],
)
def test_top_keys_from_lists(name, most, options, monkeypatch):
    flags, filled = [], top_keys.fill
    monkeypatch.setattr(top_keys, "fill", lambda *call: flags.append(filled(*call)) or flags[-1])
    monkeypatch.setattr(sparse, "CAP", 32)
    check_keys(make(7, name, **SMALL | dict(m=70, n=200, stats=()) | options), most)
    assert not flags[0].any()


def test_top_keys_of_rows_whose_lists_overflow():
    """Equal scores leave a row to the sweeps, as does a key of NaN; their neighbours in the block are right as well."""
    problem = make(8, "softmax", **SMALL | dict(m=40, n=90, stats=()))
    problem.q[:, 0, 5] = 0.0
    index, weight = check_keys(problem, 4)
    assert index[0, 0, 5].tolist() == [0, 1, 2, 3] and weight[0, 0, 5, 0] == pytest.approx(1 / 90)
    problem.q[0, 0, 9, 0] = math.nan
    index, weight = key_reading.list_top_keys(problem, attention.forward(problem), 4)
    assert (index[0, 0, 9] == -1).all() and weight[0, 0, 9].isnan().all() and (index[0, 0, 8] >= 0).all()


def test_the_bound_of_top_keys_takes_fewer_tiles_for_fewer_keys(monkeypatch):
    monkeypatch.setattr(sparse, "GROUPS", 64)
    assert [top_keys.choose_stride(most) for most in (1, 8, 16, 32)] == [64, 8, 4, 1]


def test_no_block_of_lists_crosses_4_gib():
    assert 2**32 % BYTES == 0  # they begin at multiples of their size, and only the low half of an address moves


@triton.jit
def put_one(ptr, rows, SLOT: tl.constexpr):
    row = tl.arange(0, 1)
    statistics.store_statistic(ptr, row, rows, row * 0.0 + 3.0, row != row, 0.0, row == row, SLOT)


def test_statistics_beyond_32_bits(monkeypatch):
    """The last of fourteen statistics of 2³¹/13 rows and more; the memory before is never touched."""
    check_overflow(monkeypatch)
    rows = 2**31 // 13 + 1
    page = torch.empty(13 * rows + 1, dtype=torch.float16)
    put_one[(1,)](page, rows, 13)
    assert page[-1] == 3.0
