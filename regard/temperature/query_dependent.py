"""`QueryDependent`: a temperature computed from each query."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.temperature.rows import Rows, check_queries, check_sizes

SMALLEST = 1e-2  # ε: a query can sharpen a hundredfold at most


class QueryDependent(nn.Module):
    """T_i = ε + softplus(w_h·q_i + b_h): a learned map from a query to its temperature, per head.

    It starts at T = 1 for every query (w = 0), so a model trained without it is unchanged at first.

    >>> import regard, torch
    >>> policy = regard.temperature.QueryDependent(heads=2, head_dim=4)
    >>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    >>> out = regard.attention(q, k, v, temperature=policy)
    >>> torch.allclose(out, regard.attention(q, k, v), atol=1e-6)
    True
    >>> out.square().sum().backward()
    >>> policy.weight.grad.shape, policy.bias.grad.shape
    (torch.Size([2, 4]), torch.Size([2]))
    """

    def __init__(
        self, heads: int, head_dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        one = math.log(math.expm1(1.0 - SMALLEST))  # softplus of it is 1 − ε
        self.weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.full((heads,), one, device=device, dtype=dtype))

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        check_queries(self, rows.q, self.weight)
        weight, bias = self.weight.to(visible_keys), self.bias.to(visible_keys)
        projected = torch.einsum("...hmd,hd->...hm", rows.q.to(visible_keys), weight)
        return SMALLEST + F.softplus(projected + bias[:, None])

    def extra_repr(self) -> str:
        heads, head_dim = self.weight.shape
        return f"heads={heads}, head_dim={head_dim}"
