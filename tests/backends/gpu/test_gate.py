"""The gate's Triton kernels, here in Triton's interpreter, against the formula in float64."""

import pytest
import torch

pytest.importorskip("triton")

from regard._backends.gpu import gate


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_element", [False, True])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_both_ways(dtype, per_element, width, monkeypatch):
    monkeypatch.setattr(gate, "NUMBERS", 64)  # several programs for each head
    o, do = (drawn(seed, 2, 11, 3, width).transpose(1, 2).to(dtype) for seed in (0, 1))
    g = drawn(2, 2, 11, 3, width if per_element else 1).transpose(1, 2)
    out = gate.forward(o, g)
    dx, dg = gate.backward(do, o, g)
    wide, logits = o.double().requires_grad_(), g.double().requires_grad_()
    truth = wide * torch.sigmoid(logits)
    want_dx, want_dg = torch.autograd.grad(truth, (wide, logits), do.double())
    close = dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for ours, theirs in ((out, truth), (dx, want_dx)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, **close)
    torch.testing.assert_close(dg.double(), want_dg, rtol=1e-4, atol=1e-4)


def test_an_expanded_gate_and_upstream_gradient():
    o, g = drawn(0, 1, 2, 9, 4), drawn(1, 1, 2, 1, 1).expand(1, 2, 9, 1)
    do = torch.ones(()).expand(o.shape)
    s = torch.sigmoid(g)
    torch.testing.assert_close(gate.forward(o, g), o * s)
    dx, dg = gate.backward(do, o, g)
    torch.testing.assert_close(dx, s.expand(o.shape))
    torch.testing.assert_close(dg, o.sum(-1, keepdim=True) * s * (1.0 - s))


def test_no_rows():
    o, g = torch.empty(2, 3, 0, 4), torch.empty(2, 3, 0, 1)
    assert gate.forward(o, g).shape == o.shape
    assert [x.shape for x in gate.backward(o, o, g)] == [o.shape, g.shape]
