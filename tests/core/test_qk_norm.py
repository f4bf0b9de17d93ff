"""QK-norm's autograd function, its kernels in Triton's interpreter, against torch's own norm."""

import pytest
import torch
from torch.nn.functional import rms_norm

pytest.importorskip("triton")

from regard._backends.gpu import qk_norm as kernels
from regard._core.derivatives.autograd import FusedFormula
from regard._core.formulas import divide_by_root_mean_square, norm_rows

EPS = 1e-3


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_are_those_of_torchs_norm(create_graph):
    torch.manual_seed(0)
    x, dy = torch.randn(2, 7, 3, 5).transpose(1, 2).requires_grad_(), torch.randn(2, 3, 7, 5)
    found, want = FusedFormula.apply(kernels, norm_rows, (EPS,), x), rms_norm(x, x.shape[-1:], eps=EPS**2)
    torch.testing.assert_close(found, want)
    ours, theirs = (torch.autograd.grad(y, x, dy, create_graph=create_graph)[0] for y in (found, want))
    torch.testing.assert_close(ours, theirs)
    if create_graph:
        second = [torch.autograd.grad(first.square().sum(), x)[0] for first in (ours, theirs)]
        torch.testing.assert_close(*second)


def test_mapped_gradients():
    x = torch.randn(1, 2, 3, 4).requires_grad_()
    many = torch.randn(5, 1, 2, 3, 4)
    found, want = FusedFormula.apply(kernels, norm_rows, (EPS,), x), rms_norm(x, x.shape[-1:], eps=EPS**2)
    ours, theirs = (torch.autograd.grad(y, x, many, is_grads_batched=True)[0] for y in (found, want))
    torch.testing.assert_close(ours, theirs)


def test_autocast_leaves_the_dtype():
    x = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert divide_by_root_mean_square(x, EPS).dtype == torch.bfloat16
