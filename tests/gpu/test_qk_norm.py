"""QK-norm on the GPU against float64: queries within a projection, both ways, under autocast."""

import pytest
import torch

import regard


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_output_and_gradients(dtype, limit, width):
    torch.manual_seed(0)
    projection = (3.0 * torch.randn(2, 777, 3, 4, width, device="cuda")).to(dtype).requires_grad_()
    wide = projection.detach().double().requires_grad_()
    up = torch.randn(2, 2, 4, 777, width, device="cuda").to(dtype)
    found = []
    for x in (projection, wide):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=x is projection):
            normed = torch.stack(regard.nn.qk_norm(*(x[:, :, at].transpose(1, 2) for at in (0, 1))))
        found.append((normed, torch.autograd.grad(normed, x, up.to(x.dtype))[0]))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < limit
