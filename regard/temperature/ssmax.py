"""`SSMax`: scalable softmax, whose rows stay sharp as keys grow in number."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor, nn

from regard._call.scores import is_positive
from regard._facts.readable import has_no_values
from regard.temperature.rows import Rows

SMALLEST = 1e-3  # of |s|: T stays finite and positive


class SSMax(nn.Module):
    """T = 1 / (s·log n) for a row of n visible keys: scalable softmax (arXiv 2501.19399).

    One key at +3 among keys at −2 keeps its weight from n = 10 to n = 10 000, where softmax leaves it 0.0146:

    >>> import regard, torch
    >>> for n in (10, 10_000):
    ...     z = torch.full((n,), -2.0).index_fill(0, torch.tensor(0), 3.0)
    ...     t = regard.temperature.SSMax(0.43)(torch.tensor(float(n)), None)
    ...     print(f"{regard.softmax(z)[0]:.4f} {regard.softmax(z, temperature=t)[0]:.4f}")
    0.9428 0.9401
    0.0146 1.0000

    Args:
        s: a number, or a tensor with one entry per head.
        learn: True makes s a parameter; its absolute value is used, so that T stays positive.

    n = 1 is treated as 2, where s·log n would be 0 and the row is one-hot anyway.
    """

    def __init__(self, s: float | Tensor = 0.43, learn: bool = False) -> None:
        super().__init__()
        if isinstance(s, bool) or not isinstance(s, Tensor | numbers.Real):
            raise TypeError(f"s must be a positive number or a tensor of them, one per head, got {s!r}")
        known = isinstance(s, Tensor) or is_positive(s)  # a meta tensor has no value to check
        value = torch.as_tensor(s if known else math.nan, dtype=torch.float32)
        positive = known and (has_no_values(value) or bool(((value > 0) & value.isfinite()).all()))
        if value.ndim > 1 or not positive:
            raise ValueError(f"s must be a positive number or a tensor of them, one per head, got {s!r}")
        if learn:
            self.s = nn.Parameter(value.clone())
        else:
            self.register_buffer("s", value, persistent=False)

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        is_number = self.s.ndim == 0 and self.s.device.type == "cpu" and not isinstance(self.s, nn.Parameter)
        if is_number and visible_keys.is_cuda and not torch.compiler.is_compiling():
            number = max(abs(float(self.s)), SMALLEST)  # a copy to the GPU may wait for what the GPU does
            return 1.0 / (number * torch.log(visible_keys.clamp_min(2.0)))
        s = self.s.to(visible_keys, non_blocking=True).abs().clamp_min(SMALLEST)
        heads = visible_keys.shape[-2] if visible_keys.ndim > 1 else s.numel()
        if s.numel() not in (1, heads):
            raise ValueError(f"SSMax with s of {s.numel()} heads got queries of {heads} heads; pass one s per head")
        s = s if s.ndim == 0 else s[:, None]
        return 1.0 / (s * torch.log(visible_keys.clamp_min(2.0)))

    def extra_repr(self) -> str:
        s = "…" if self.s.is_meta else [round(x, 4) for x in self.s.flatten().tolist()]
        return f"s={s}, learn={isinstance(self.s, nn.Parameter)}"
