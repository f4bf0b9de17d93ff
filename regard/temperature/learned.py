"""`Learned`: one learned temperature per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard._call.scores import is_positive
from regard.temperature.rows import Rows, check_sizes

LARGEST = 87.0  # of |θ|: T stays finite and positive in float32


class Learned(nn.Module):
    """T_h = exp(θ_h): one learned temperature per head, always positive, starting at `begin`.

    >>> import regard, torch
    >>> policy = regard.temperature.Learned(heads=2)
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> regard.attention(q, k, v, temperature=policy).square().sum().backward()
    >>> policy.log_temperature.grad.shape
    torch.Size([2])

    Under `regard.using`, pass its parameters to the optimizer yourself; in `regard.nn` they belong to the module.
    """

    def __init__(
        self,
        heads: int,
        begin: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(heads=heads)
        if not is_positive(begin):
            raise ValueError(f"begin must be a positive, finite number, got {begin!r}")
        self.log_temperature = nn.Parameter(torch.full((heads,), math.log(begin), device=device, dtype=dtype))

    @property
    def value(self) -> Tensor:
        """T per head [H, 1, 1], which broadcasts to (B, H, M, 1)."""
        wide = self.log_temperature.to(torch.promote_types(self.log_temperature.dtype, torch.float32))
        return wide.clamp(-LARGEST, LARGEST).exp()[:, None, None]

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [H, 1]."""
        return self.value[..., 0].to(visible_keys)

    def extra_repr(self) -> str:
        return f"heads={self.log_temperature.numel()}"
