"""A temperature that each query chooses for itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST = 1e-2  # ε: the sharpest a query may become is a hundredfold


class QueryDependent(nn.Module):
    """T_i = ε + softplus(w_h·q_i + b_h): a learned map from a query to its temperature, per head.

    It begins as T = 1 for every query (w = 0), so a model trained without it starts where it was.

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

    def __init__(self, heads: int, head_dim: int, *, device=None, dtype=None) -> None:
        super().__init__()
        for name, size in (("heads", heads), ("head_dim", head_dim)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an int ≥ 1, got {size!r}")
        one = math.log(math.expm1(1.0 - SMALLEST))  # softplus of it is 1 − ε
        self.weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.full((heads,), one, device=device, dtype=dtype))

    def forward(self, visible_keys: Tensor, rows) -> Tensor:
        heads, head_dim = self.weight.shape
        if rows.q.shape[-3] != heads or rows.q.shape[-1] != head_dim:
            raise ValueError(
                f"QueryDependent(heads={heads}, head_dim={head_dim}) met queries of {rows.q.shape[-3]} heads of width "
                f"{rows.q.shape[-1]}; make it with those"
            )
        weight, bias = self.weight.to(visible_keys), self.bias.to(visible_keys)
        along = torch.einsum("...hmd,hd->...hm", rows.q.to(visible_keys), weight)
        return SMALLEST + F.softplus(along + bias[:, None])

    def extra_repr(self) -> str:
        heads, head_dim = self.weight.shape
        return f"heads={heads}, head_dim={head_dim}"
