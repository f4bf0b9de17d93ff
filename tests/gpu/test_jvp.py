"""Tangents on a GPU, against the float64 reference on the same GPU; forward mode without an N × N tensor."""

from __future__ import annotations

import pytest
import torch
from attention_data import Poisoned, make
from rows_data import FUSED
from tangent_data import check_tangent

import regard
from regard import reference
from regard._backends.gpu.attention import launch, tangent
from regard._backends.gpu.attention.masks import tables

pytestmark = pytest.mark.filterwarnings("default")
LONG = dict(b=2, h=4, g=2, m=333, n=517, d=64, e=64, device="cuda", stats=())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for module in (launch, tables, tangent):
        monkeypatch.setattr(module, "torch", Poisoned())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_every_normalizer(name, dtype):
    check_tangent(launch, make(1, name, **LONG, dtype=dtype))


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize("width", [40, 128, 256])
def test_widths(name, width):
    check_tangent(launch, make(2, name, **LONG | dict(d=width, e=width), dtype=torch.bfloat16, causal=True))


@pytest.mark.parametrize("width", [128, 256])
def test_wide_float32(width):
    check_tangent(launch, make(2, **LONG | dict(d=width, e=width), causal=True))


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "entmax15"])
@pytest.mark.parametrize(
    "options",
    [dict(causal=True, lengths=True), dict(left=40, right=9), dict(temperature=True, softcap=2.0), dict(mask=True),
     dict(bias="b"), dict(bias="m"), dict(scale=-0.4), dict(sharp=10.0), dict(strided=True)],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_options(name, options):
    check_tangent(launch, make(3, name, **LONG | options, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_a_sink_does_not_move(name):
    check_tangent(launch, make(4, name, **LONG, dtype=torch.bfloat16, sink=True), offset=20.0)


@pytest.mark.parametrize("name", ["softmax", "softmax1", "sparsemax"])
def test_a_constant_part_of_the_logits_tangents_is_not_rounded(name):
    check_tangent(launch, make(5, name, **LONG, dtype=torch.bfloat16), offset=20.0)


@pytest.mark.parametrize("names", ["q", "k", "v", "qk"])
def test_tangents_of_some_inputs(names):
    check_tangent(launch, make(6, **LONG, dtype=torch.bfloat16), names)


def draw(*shape, dtype=torch.bfloat16):
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))


@pytest.mark.parametrize("name", ["softmax", "softmax1", "entmax15"])
def test_long_rows_take_no_matrix(name, monkeypatch):
    def refuse(*given, **options):
        raise AssertionError("the reference was called")

    monkeypatch.setattr(reference, "attention", refuse)
    n = 16384
    at, along = draw(1, 2, n, 64), draw(1, 2, n, 64)
    attend = lambda *x: regard.attention(*x, is_causal=True, normalizer=name)  # noqa: E731
    torch.func.jvp(attend, at, along)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    used = torch.cuda.memory_allocated()
    _, moved = torch.func.jvp(attend, at, along)
    assert moved.isfinite().all()
    assert torch.cuda.max_memory_allocated() - used < 2 * n * n / 2  # entmax15's lists of candidates: 4 KiB a row


def test_a_tangent_beside_an_ordinary_backward():
    (q, k, v), along = draw(2, 4, 512, 64), draw(2, 4, 512, 64)
    grads = []
    for with_tangent in (True, False):
        w = v.clone().requires_grad_()
        attend = lambda q, k, w=w: regard.attention(q, k, w, normalizer="softmax1")  # noqa: E731
        out = torch.func.jvp(attend, (q, k), along[:2])[0] if with_tangent else attend(q, k)
        grads.append(torch.autograd.grad(out.square().sum(), w)[0])
    torch.testing.assert_close(*grads)


def test_forward_over_reverse():
    at, along = draw(1, 2, 300, 32, dtype=torch.float32), draw(1, 2, 300, 32, dtype=torch.float32)
    found = []
    for attend in (regard.attention, lambda *x: reference.attention(*x)[0]):
        slope = torch.func.grad(lambda *x, attend=attend: attend(*x).sin().sum(), (0, 1, 2))
        found.append([x.double() for x in torch.func.jvp(slope, at, along)[1]])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
