"""`Fixed`: one temperature for every row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._call.scores import is_positive
from regard.temperature.rows import Rows


class Fixed(nn.Module):
    """T = `value` for every row: a number as a policy, for code that compares or configures policies.

    >>> import regard, torch
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> a, b = (regard.attention(q, k, v, temperature=t) for t in (2.0, regard.temperature.Fixed(2.0)))
    >>> torch.equal(a, b)
    True
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        if not is_positive(value):
            raise ValueError(f"value must be a positive, finite number, got {value!r}")
        self.value = float(value)

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T, a scalar."""
        return torch.full((), self.value, dtype=visible_keys.dtype, device=visible_keys.device)

    def extra_repr(self) -> str:
        return f"{self.value:g}"
