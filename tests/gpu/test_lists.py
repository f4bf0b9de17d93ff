"""Threshold maps through candidate lists, compiled, against the float64 oracle on the same GPU."""

from __future__ import annotations

import dataclasses
import math

import interval_data
import pytest
import torch
from attention_data import FLOOR, Poisoned, check_backward, check_forward, make

from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.config import config_of, options, view
from regard._backends.gpu.attention.forward import launch as forward
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._call.problem import Upstream

pytestmark = pytest.mark.filterwarnings("default")
LEAST_KEYS = sparse.LEAST_KEYS
LONG = dict(b=1, h=2, g=1, m=1100, n=1100, dtype=torch.bfloat16, device="cuda")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(attention, "torch", Poisoned())
    monkeypatch.setattr(sparse, "torch", Poisoned())
    monkeypatch.setattr(sparse, "LEAST_KEYS", dict.fromkeys(sparse.LEAST_KEYS, 256))


def check(problem, floor=FLOOR):
    assert sparse.supports(problem, "forward") is None and sparse.supports(problem, "backward") is None
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0, floor=floor), slack=2.0)


@pytest.mark.parametrize(
    ("name", "d", "causal"), [("entmax15", 128, True), ("sparsemax", 64, False), ("entmax(alpha=1.7)", 64, True)]
)
def test_model_shapes(name, d, causal):
    check(make(1, name, d=d, e=d, causal=causal, **LONG))


@pytest.mark.parametrize("options", [dict(left=300, right=40, temperature=True), dict(lengths=True)])
def test_windows_and_lengths(options):
    check(make(2, "entmax15", d=64, e=128, **LONG | dict(b=2, m=700, n=1500), **options))


@pytest.mark.parametrize(("d", "e"), [(40, 40), (72, 64), (80, 80), (96, 96), (128, 256), (192, 128), (256, 256)])
def test_other_widths(d, e):
    check(make(10, "entmax15", d=d, e=e, causal=True, **LONG))


@pytest.mark.parametrize("stats", [statistics.NAMES, ()], ids=["statistics", "plain"])
@pytest.mark.parametrize("name", ["entmax15", "sparsemax", "entmax(alpha=1.7)"])
@pytest.mark.parametrize("kind", ["soft cap", "bias", "hiding bias", *interval_data.KINDS])
def test_options_of_the_forward(kind, name, stats, monkeypatch):
    monkeypatch.setattr(attention, "_has_tape", lambda problem: False)  # no tape of the sweeps
    cap = dict(softcap=2.0) if kind == "soft cap" else {}
    problem = make(11, name, d=64, e=64, causal="soft" in kind or "bias" in kind, sharp=2.0, stats=stats, **cap, **LONG)
    if "bias" in kind:
        problem = interval_data.with_biases(problem, 12, names=("key",), hides="hiding" in kind)
    elif not cap:
        problem = dataclasses.replace(
            problem, interval=interval_data.make_interval(kind, 1, 2, 1100, 1100, device="cuda")
        )
    assert sparse.supports(problem, "forward") is None and sparse.supports(problem, "backward") is not None
    answer = interval_data.check_forward(attention, problem, slack=2.0)
    interval_data.check_backward(attention, problem, answer, slack=2.0)


@pytest.mark.parametrize("stats", [statistics.NAMES, ()], ids=["statistics", "plain"])
@pytest.mark.parametrize(("n", "d"), [(50, 64), (128, 80), (197, 64), (256, 128)])
@pytest.mark.parametrize("name", ["entmax15", "sparsemax", "entmax(alpha=1.7)"])
def test_short_rows(name, n, d, stats):
    for extra in (dict(causal=True), dict(lengths=True, softcap=2.0), dict(left=30, right=5, temperature=True)):
        problem = make(13, name, d=d, e=d, stats=stats, **LONG | dict(b=2, m=n, n=n), **extra)
        assert forward.keeps_scores(problem) == (not stats or n <= 128)
        check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("sharp", [0.02, 30.0])
def test_flat_and_sharp_rows(sharp):
    problem = make(3, "entmax15", d=64, e=64, sharp=sharp, **LONG | dict(n=3000, m=300))
    # q·k up to 1000, summed in float32: scores are off by 1e-6 and more, and so is the gain of a row with one weight
    check(problem, FLOOR if sharp < 1 else FLOOR | dict(gradient_gain=1e-3))


@pytest.mark.parametrize(("m", "n", "causal"), [(4096, 4096, True), (2048, 16384, False)])
def test_lists_solve_every_normal_row(m, n, causal):
    problem = make(5, "entmax15", d=128, e=128, stats=(), causal=causal, **LONG | dict(h=4, m=m, n=n))
    config, _ = config_of(problem, "forward_threshold")
    views, opt = [view(x) for x in (problem.q, problem.k, problem.v)], options(problem)
    shape = problem.q.shape[:-1]
    o, (shift, z) = torch.empty_like(problem.q), torch.empty(2, *shape, device="cuda")
    failed = sparse.forward(problem, None, views, view(o), shift, z, shift, opt, config, 40)
    assert int(failed.sum()) == 0


def test_where_lists_begin(monkeypatch):
    monkeypatch.setattr(sparse, "LEAST_KEYS", LEAST_KEYS)
    least = LEAST_KEYS["forward"]
    for n in (least - 1, least, 3500, 4000, 4100):
        for causal in (False, True):
            problem = make(8, "entmax15", d=64, e=64, causal=causal, **LONG | dict(m=n if causal else 200, n=n))
            assert (sparse.supports(problem, "forward") is None) == (n >= least)
            check_forward(attention, problem, slack=2.0)


def test_backward_keeps_one_set_of_lists():
    problem = make(9, "entmax15", d=64, e=64, stats=(), causal=True, **LONG | dict(m=4096, n=4096))
    answer = attention.forward(problem)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = attention.backward(problem, answer, Upstream(torch.ones_like(answer.o)))
    scratch = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in (grads.q, grads.k, grads.v))
    queries, keys = (sparse.CandidateLists(problem, False, transposed).entries.nbytes for transposed in (False, True))
    assert max(queries, keys) < scratch < 0.9 * (queries + keys)


def test_chunks_and_bits(monkeypatch):
    monkeypatch.setattr(sparse, "CHUNK", 5)
    problem = make(6, "entmax15", d=64, e=64, causal=True, **LONG | dict(b=2, h=4, g=2))
    answers = []
    check(problem)
    for _ in range(3):
        answer = attention.forward(problem)
        grads = attention.backward(problem, answer, Upstream(torch.ones_like(answer.o)))
        answers.append((answer.o, answer.stats, grads.q, grads.k, grads.v))
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


def test_a_nan_stays():
    problem = make(7, "entmax15", d=64, e=64, stats=(), **LONG)
    problem.k[0, 0, 777, 3] = math.nan
    assert attention.forward(problem).o.isnan().all()
