"""Score functions under Triton's interpreter, against the float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from attention_data import make
from interval_data import make_interval, with_biases
from score_functions import ALL, check, with_score

from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.forward import decode

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy overflows where a GPU does too
]
SMALL = dict(b=1, h=4, g=2, m=13, n=21)


@pytest.mark.parametrize("name", list(ALL))
def test_every_function(name):
    check(attention, with_score(make(1, **SMALL, causal=True), name))


@pytest.mark.parametrize("normalizer", ["sigmoid", "entmax15"])
def test_other_families_with_intervals(normalizer):
    problem = make(2, normalizer, **SMALL, temperature=True)
    interval = make_interval("documents", 1, 4, 13, 21, 0)
    check(attention, with_score(dataclasses.replace(problem, interval=interval), "clamp"))


def test_beside_biases():
    check(attention, with_score(with_biases(make(3, **SMALL), 1, ("key", "row"), True), "bend"))


@pytest.fixture
def few_keys(monkeypatch):
    """Few keys are enough for the kernel that decodes, in two parts."""
    monkeypatch.setattr(decode, "KEYS", 33)
    monkeypatch.setattr(decode, "SHORTEST", 25)


def test_decoding_knows_the_head_of_each_row(few_keys):
    problem = with_score(make(4, **SMALL | dict(m=1, n=50, d=4, e=4), stats=("entropy", "first_key_mass")), "clamp")
    assert registry.choose(problem).name == "decode"
    check(attention, problem)


def test_the_interval_holds_the_position_behind_a_cache(few_keys):
    problem = make(5, **SMALL | dict(m=2, n=50, d=4, e=4), stats=("first_key_mass",))
    interval = torch.tensor([[0, 0], [49, 50], [48, 49]], dtype=torch.int32)[:, None, None].expand(3, 1, 4, 2)
    check(attention, with_score(dataclasses.replace(problem, interval=interval), "fade"))
