"""A part of the keys by the Triton kernels, interpreted, against the same keys of the whole sequence in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from attention_data import make

from regard import reference
from regard._backends.gpu.attention import partial as parts

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("first", [(0, 64), (64, 0), (32, 32)], ids=["ahead", "behind", "beside"])
def test_a_window_over_a_part(name, first):
    """Of keys ahead of the queries, in the window's right side, the part's own positions say that they lie behind."""
    (query, key), size = first, 64
    whole = dataclasses.replace(make(2, name, b=1, h=1, g=1, m=128, n=128), left=70, right=50, stats=())
    queries, keys = slice(query, query + size), slice(key, key + size)
    part = dict(q=whole.q[:, :, queries], k=whole.k[:, :, keys], v=whole.v[:, :, keys])
    found = parts.forward(dataclasses.replace(whole, **part, first_query=query, first_key=key, queries=128))
    shown = torch.zeros(128, dtype=torch.bool)
    shown[keys] = True
    o, _ = reference.of_problem(dataclasses.replace(whole, mask=shown.expand(1, 1, 128, 128)))
    torch.testing.assert_close(found.o.double(), o[:, :, queries], rtol=1e-4, atol=1e-5)
