"""How much of a difference rounding explains: measured on the model itself, not guessed.

Every module's output is multiplied by 1 + ε·n, n normal and ε the spacing of its dtype, as rounding does. The change of
the model's output covers its depth, its widths, and what amplifies (norms, experts that are chosen by a narrow vote).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MARGIN = 16.0  # the budget over the measured change: a module rounds several times, and not at random
FLOOR = 16.0  # spacings of the dtype that any two evaluations of one expression may differ by


@contextmanager
def rounding_noise(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Multiplies the floating-point outputs of every module by 1 + ε·n inside the block."""
    generator = torch.Generator().manual_seed(seed)

    def shake(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta:
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            return (
                (x.float() * (1 + torch.finfo(x.dtype).eps * noise)).to(x.dtype)
                if x.dtype.itemsize < 4
                else (x * (1 + torch.finfo(x.dtype).eps * noise.to(x.dtype)))
            )
        if type(x) in (tuple, list):
            return type(x)(shake(part) for part in x)
        return x

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return shake(output)

    hooks = [module.register_forward_hook(hook) for module in model.modules() if not isinstance(module, CONTAINERS)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def row_changes(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_i‖ over the root mean square of the rows' norms ‖a_i‖, for tensors [B, N, …]: [B, N] in float64.

    >>> from regard.health.probe.rounding import row_changes
    >>> row_changes(torch.ones(1, 3, 2), torch.tensor([[[1.0, 1.0], [1.0, 1.0], [1.0, 2.0]]])).round(decimals=2)
    tensor([[0.0000, 0.0000, 0.7100]], dtype=torch.float64)
    """
    a, b = (x.detach().to("cpu", torch.float64).flatten(2) for x in (a, b))
    finite = torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1)
    size = a[torch.isfinite(a).all(-1)].square().sum(-1).mean().sqrt().clamp_min(1e-30)
    change = (a - b).norm(dim=-1) / size
    return change.where(finite | (a == b).all(-1), torch.inf).where(~(a == b).all(-1), 0.0)


def largest_change(a: Tensor, b: Tensor) -> float:
    """The largest of `row_changes`, 0 for no rows; inf for other shapes. Of [B, C] every row is one."""
    if a.shape != b.shape:
        return float("inf")
    if a.ndim < 3:
        a, b = (x[:, None] if x.ndim == 2 else x.reshape(1, 1, -1) for x in (a, b))
    return float(row_changes(a, b).max()) if a.shape[0] and a.shape[1] else 0.0


def alone_in_batch(output: Tensor, alone: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """(a row of a batch's output, the same with what the row gives alone), to be compared.

    Of [B, B], as CLIP's logits of texts and images, one place is of the row alone.

    >>> from regard.health.probe.rounding import alone_in_batch
    >>> alone_in_batch(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0]]), 1)
    (tensor([[3., 4.]]), tensor([[3., 5.]]))
    """
    one = output[row : row + 1]
    if alone.shape != (1, 1) or output.ndim != 2 or output.shape[0] != output.shape[1]:
        return one, alone
    changed = one.clone()
    changed[0, row] = alone[0, 0]
    return one, changed


def budget(change: float, dtype: torch.dtype) -> float:
    """The change that rounding explains where `rounding_noise` made one of `change`."""
    return max(MARGIN * change, FLOOR * torch.finfo(dtype).eps)
