"""The columns by which the tensor cores add a bias per key, interpreted."""

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


@pytest.mark.parametrize("sizes", [(2, 4, 1, 300), (1, 4, 1, 300), (2, 1, 1, 300), (1, 1, 1, 300)], ids=str)
def test_three_columns_add_up_to_the_bias(sizes, monkeypatch):
    monkeypatch.setattr(biases, "torch", Poisoned())
    p = make(0, b=2, h=4, g=2, m=3, n=300, d=16, e=16, dtype=torch.bfloat16)
    bias = torch.randn(sizes, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 300)
    p = replace(p, bias=bias.expand(2, 4, 3, 300))
    found, columns = biases.make_key_bias(p, config.options(p))
    assert config.has_key_bias(p) and columns.shape == (*sizes[:2], 300, biases.COLUMNS)
    truth = bias.double().squeeze(2) / p.scale
    pieces = columns[..., :3].double()
    assert ((pieces.sum(-1) - truth).abs() <= 2**-23 * truth.abs()).all() and not columns[..., 3:].any()
    assert found.flags.shape == sizes[:2] and not found.flags.any()
    assert (found.b, found.h) == (int(sizes[0] > 1), int(sizes[1] > 1))


@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan, torch.finfo(torch.float32).min])
def test_a_bias_that_cannot_be_added_flags_its_head(odd, monkeypatch):
    monkeypatch.setattr(biases, "torch", Poisoned())
    p = make(0, b=2, h=4, g=2, m=3, n=300, d=16, e=16, dtype=torch.bfloat16)
    bias = torch.zeros(2, 4, 1, 300)
    bias[1, 2, 0, 299] = odd
    p = replace(p, bias=bias.expand(2, 4, 3, 300))
    found, columns = biases.make_key_bias(p, config.options(p))
    assert found.flags.nonzero().tolist() == [[1, 2]] and not columns.any()
