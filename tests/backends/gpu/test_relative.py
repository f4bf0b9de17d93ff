"""The table from which the Hopper kernels add a bias by relative position, interpreted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, make

from regard._backends.gpu.attention import config
from regard._backends.gpu.attention.hopper import biases

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
PADDING = biases.PADDING.value


def make_table(monkeypatch, table):
    monkeypatch.setattr(biases, "torch", Poisoned())
    p = make(0, b=2, h=4, g=2, m=900, n=701, d=16, e=16, dtype=torch.bfloat16)
    p = replace(p, relative=table.expand(4, 1600))
    return p, biases.make_relative_bias(p, config.options(p))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("step", [1, 2])
def test_the_table_is_padded_and_in_units_of_the_products(heads, step, monkeypatch):
    table = torch.randn(heads, 1600 * step, generator=torch.Generator().manual_seed(1))[:, ::step]
    p, found = make_table(monkeypatch, table)
    assert found.table.shape == (heads, 1600 + 2 * PADDING) and found.width == found.table.shape[1]
    torch.testing.assert_close(found.table[:, PADDING:-PADDING].double(), table.double() / p.scale)
    assert not found.table[:, :PADDING].any() and not found.table[:, -PADDING:].any()
    assert not found.flags.any() and (found.heads, found.b, found.h) == (heads, 0, int(heads > 1))


@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan, torch.finfo(torch.float32).min])
def test_a_bias_that_cannot_be_added_flags_its_head(odd, monkeypatch):
    table = torch.zeros(4, 1600)
    table[2, 1599] = odd
    _, found = make_table(monkeypatch, table)
    assert found.flags.tolist() == [0, 0, 1, 0]
    entry = found.table[2, PADDING + 1599]
    if odd < 0:  # hidden, or far below every other score, and finite
        assert -(2.0**100) <= entry <= -(2.0**99) and (entry == -(2.0**100)) == (odd == -math.inf)
    else:
        assert not math.isfinite(entry)
