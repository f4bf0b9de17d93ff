"""One temperature for every row."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn

from regard.scores import is_finite


class Fixed(nn.Module):
    """T = `value` everywhere: the number itself as a policy, for where policies are compared or configured by class.

    >>> import regard, torch
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> a, b = (regard.attention(q, k, v, temperature=t) for t in (2.0, regard.temperature.Fixed(2.0)))
    >>> torch.equal(a, b)
    True
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (number and is_finite(value) and float(value) > 0):
            raise ValueError(f"value must be a positive, finite number, got {value!r}")
        self.value = float(value)

    def forward(self, visible_keys: Tensor, rows) -> Tensor:
        return torch.full((), self.value, dtype=visible_keys.dtype, device=visible_keys.device)

    def extra_repr(self) -> str:
        return f"{self.value:g}"
