"""Tangents by the CPU kernels, against the dense float64 reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("numba")
from attention_data import Poisoned, make
from interval_data import make_interval
from rows_data import ORDERED
from tangent_data import check_tangent, make_along

from regard._backends.cpu.attention import launch, tangent

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
OPTIONS = [
    dict(causal=True), dict(left=4, right=9), dict(lengths=True), dict(temperature=True, softcap=2.0), dict(mask=True),
    dict(bias="b"), dict(scale=-0.4), dict(sharp=10.0), dict(strided=True), dict(m=90, n=70, b=4, causal=True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (launch, tangent):
        monkeypatch.setattr(module, "torch", Poisoned())


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [*ORDERED, "entmax(alpha=1.25)", "sigmoid(bias=-3)"])
def test_every_normalizer(name):
    check_tangent(launch, make(1, name, dtype=torch.float64))
    check_tangent(launch, make(2, name, dtype=torch.float64, softcap=2.0, causal=True))


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", ["softmax", "relu", "entmax15"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
def test_options(name, options):
    check_tangent(launch, make(3, name, **options))


@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_a_sink_does_not_move(name):
    check_tangent(launch, make(4, name, sink=True), offset=20.0)


@pytest.mark.parametrize("names", ["q", "k", "v", "qk"])
def test_tangents_of_some_inputs(names):
    for name in ("softmax", "sigmoid", "sparsemax"):
        check_tangent(launch, make(5, name, causal=True), names)


def test_intervals():
    problem = make(6, b=2)
    (b, h, m, _), n = problem.q.shape, problem.k.shape[2]
    check_tangent(launch, dataclasses.replace(problem, interval=make_interval("scattered", b, h, m, n, 0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_numbers(dtype):
    for name in ("softmax", "sigmoid", "entmax15"):
        check_tangent(launch, make(7, name, dtype=dtype), offset=20.0)


def test_rows_that_see_nothing_and_hidden_keys_that_are_nan():
    problem = make(8, mask=True, stats=())
    problem = dataclasses.replace(problem, mask=problem.mask.clone())
    problem.mask[..., -1] = False
    along = make_along(problem)
    for x in (problem.k, problem.v, along.k, along.v):
        x[:, :, -1] = math.nan
    o = launch.tangent(problem, launch.forward(problem), along)
    assert o.isfinite().all() and not o[0, :, 0].any()


def test_no_keys():
    problem = make(9, n=0, stats=())
    o = launch.tangent(problem, launch.forward(problem), make_along(problem))
    assert o.shape == problem.q.shape[:3] + problem.v.shape[3:] and not o.any()
