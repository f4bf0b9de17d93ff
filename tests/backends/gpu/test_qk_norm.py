"""QK-norm's Triton kernels, here in Triton's interpreter, against the formula in float64."""

import pytest
import torch

pytest.importorskip("triton")

from regard._backends.gpu import gate, qk_norm


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3.0


def exact(x, dy, eps):
    wide = x.double().requires_grad_()
    y = wide / (wide.square().mean(-1, keepdim=True) + eps**2).sqrt()
    return y, torch.autograd.grad(y, wide, dy.double())[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_both_ways(dtype, width, monkeypatch):
    monkeypatch.setattr(gate, "NUMBERS", 64)  # several programs for each head
    x = drawn(0, 2, 11, 3, 3 * width).to(dtype)[..., :width].transpose(1, 2)  # queries within a projection
    dy = drawn(1, 2, 3, 11, width).to(dtype)
    found = qk_norm.forward(x, 0.1), qk_norm.backward(dy, x, 0.1)
    close = dict(rtol=1e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, exact(x, dy, 0.1), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, **close)


def test_zeros_and_huge_numbers():
    x, dy = drawn(0, 1, 2, 4, 8), torch.ones(()).expand(1, 2, 4, 8)
    x[:, :, 1], x[:, :, 2] = 0.0, 1e15 * x[:, :, 2]
    for ours, theirs in zip((qk_norm.forward(x, 1e-6), qk_norm.backward(dy, x, 1e-6)), exact(x, dy, 1e-6), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_no_rows():
    x = torch.empty(2, 3, 0, 4)
    assert qk_norm.forward(x, 1e-6).shape == qk_norm.backward(x, x, 1e-6).shape == x.shape
