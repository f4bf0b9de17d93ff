"""Tangents by the Triton kernel, under its interpreter, against the dense float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, make
from interval_data import make_interval
from rows_data import FUSED
from tangent_data import check_tangent, make_along

from regard._backends.gpu.attention import launch, tangent
from regard._backends.gpu.attention.masks import tables

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernel compiled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # torch's own, in forward mode
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy overflows where a GPU does too
]
SMALL = dict(b=1, h=2, g=1, m=18, n=37)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (launch, tables, tangent):
        monkeypatch.setattr(module, "torch", Poisoned())


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", FUSED)
def test_every_normalizer(name):
    check_tangent(launch, make(1, name, **SMALL, dtype=torch.float64))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize(
    "options",
    [dict(causal=True, lengths=True, b=2), dict(left=4, right=9, temperature=True, softcap=2.0), dict(mask=True),
     dict(bias="b"), dict(bias="m")],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_options(name, options):
    check_tangent(launch, make(2, name, **SMALL | options))


def test_intervals_and_row_biases():
    problem = make(3, **SMALL)
    (b, h, m, _), n = problem.q.shape, problem.k.shape[2]
    problem = dataclasses.replace(problem, interval=make_interval("scattered", b, h, m, n, 0))
    check_tangent(launch, problem)


@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_a_sink_does_not_move(name):
    check_tangent(launch, make(4, name, **SMALL, sink=True), offset=20.0)


@pytest.mark.parametrize("names", ["q", "k", "v"])
def test_tangents_of_one_input(names):
    check_tangent(launch, make(5, **SMALL), names)


@pytest.mark.parametrize("name", ["softmax", "softmax1", "entmax15"])
def test_a_constant_part_of_the_logits_tangents_is_not_rounded(name):
    check_tangent(launch, make(6, name, **SMALL, dtype=torch.bfloat16), offset=20.0)


def test_tangents_of_logits_may_exceed_float16():
    problem = make(7, **SMALL, dtype=torch.float16, scale=3e5, sharp=1e-5)
    check_tangent(launch, dataclasses.replace(problem, v=problem.v * 1e-3), "q")


def test_no_keys():
    problem = make(8, **SMALL | dict(n=0), stats=())
    assert not launch.tangent(problem, launch.forward(problem), make_along(problem)).any()
