"""Few queries over many keys, compiled: real lengths, every splitting normaliser, equal bits, gradients."""

from __future__ import annotations

import pytest
import torch
from attention_data import FUSED, check_backward, check_forward, make

from regard import normalizers
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry

SPLITTING = [name for name in FUSED if normalizers.get(name).family != "threshold"]
CUDA = dict(device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", SPLITTING)
@pytest.mark.parametrize("sharp", [1.0, 8.0])
def test_every_splitting_normalizer(name, sharp):
    problem = make(1, name, b=2, h=8, g=2, m=3, n=9001, d=128, e=128, sharp=sharp, **CUDA)
    assert registry.choose(problem).name == "decode"
    check_backward(attention, problem, check_forward(attention, problem), slack=2.0)


@pytest.mark.parametrize(("m", "group", "d", "dtype"), [
    (1, 1, 64, torch.bfloat16), (16, 1, 128, torch.float16), (8, 4, 128, torch.bfloat16), (16, 4, 64, torch.bfloat16),
    (16, 8, 128, torch.bfloat16), (5, 2, 256, torch.bfloat16), (3, 2, 40, torch.float32), (2, 1, 16, torch.float64),
    (32, 4, 128, torch.bfloat16), (32, 1, 64, torch.float16), (24, 8, 256, torch.bfloat16), (20, 2, 40, torch.float32),
    (8, 4, 320, torch.bfloat16), (1, 1, 512, torch.float16), (2, 1, 320, torch.float32),
])  # fmt: skip
def test_shapes(m, group, d, dtype):
    problem = make(2, b=1, h=2 * group, g=2, m=m, n=4100, d=d, e=d, device="cuda", dtype=dtype)
    assert registry.choose(problem).name == "decode"
    check_forward(attention, problem)


def test_options_and_equal_bits():
    for options in (dict(lengths=True, b=4), dict(left=9, right=3000), dict(softcap=2.0, sink=True, temperature=True)):
        problem = make(3, **dict(b=1, h=4, g=2, m=4, n=5000, d=128, e=128) | options, **CUDA)
        first = check_forward(attention, problem)
        for _ in range(3):
            again = attention.forward(problem)
            assert torch.equal(first.o, again.o) and torch.equal(first.stats, again.stats)


def test_a_long_cache():
    problem = make(4, b=1, h=4, g=1, m=1, n=131072, d=128, e=128, **CUDA)
    check_forward(attention, problem)
