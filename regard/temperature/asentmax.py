"""`ASEntmax`: the temperature of adaptive-scalable entmax, a learned power of log n."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._call.scores import is_real
from regard.temperature.rows import Rows, check_queries, check_sizes


class ASEntmax(nn.Module):
    """T_i = 1 / (δ + β_i·(log n)^γ_i) for a row of n visible keys, β and γ learned per head (arXiv 2506.16640).

        β_i = softplus(w_h·q_i + b_h)          γ_i = s·tanh(u_h·q_i + c_h)

    Where SSMax has the factor s·log n, this one learns how fast it grows with n, and from each query. Use it with
    entmax, whose support a larger factor narrows. At first w = u = 0, b = c = 0: T = 1/(δ + log 2) whatever n.

    >>> import regard, torch
    >>> policy = regard.temperature.ASEntmax(heads=2, head_dim=4)
    >>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    >>> regard.attention(q, k, v, normalizer="entmax15", temperature=policy).square().sum().backward()
    >>> policy.beta_weight.grad.shape, policy.gamma_bias.grad.shape
    (torch.Size([2, 4]), torch.Size([2]))

    Args:
        heads: number of query heads.
        head_dim: width of their queries.
        delta: δ ≥ 0, the factor at β = 0.
        exponent: s, the largest |γ|.

    n = 1 is treated as 2, where log n would be 0 and the row is one-hot anyway.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        delta: float = 1.0,
        exponent: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        for name, number in (("delta", delta), ("exponent", exponent)):
            if not (is_real(number) and 0 <= number < math.inf):
                raise ValueError(f"{name} must be a finite number ≥ 0, got {number!r}")
        self.delta, self.exponent = float(delta), float(exponent)
        self.beta_weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.beta_bias = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))
        self.gamma_weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.gamma_bias = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        check_queries(self, rows.q, self.beta_weight)
        beta = F.softplus(self._project(rows.q, self.beta_weight, self.beta_bias, visible_keys))
        gamma = self.exponent * torch.tanh(self._project(rows.q, self.gamma_weight, self.gamma_bias, visible_keys))
        return 1.0 / (self.delta + beta * torch.log(visible_keys.clamp_min(2.0)) ** gamma).clamp_min(1e-6)

    @staticmethod
    def _project(q: Tensor, weight: Tensor, bias: Tensor, like: Tensor) -> Tensor:
        return torch.einsum("...hmd,hd->...hm", q.to(like), weight.to(like)) + bias.to(like)[:, None]

    def extra_repr(self) -> str:
        heads, head_dim = self.beta_weight.shape
        return f"heads={heads}, head_dim={head_dim}, delta={self.delta:g}, exponent={self.exponent:g}"
