"""`LearnedParameter`: the parameter of a normaliser, learned per head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard import normalizers
from regard.normalizers import Choice


class LearnedParameter(nn.Module):
    """θ_h = low + (high − low)·sigmoid(raw_h) within the kernels' range, or θ_h = raw_h − ln n where there is none.

    The first is α of entmax, in [1.005, 2] and 1.5 at first (Correia et al. 2019, arXiv 1909.00015). The second is the
    bias of sigmoid, −ln n at first (Ramapuram et al. 2024, arXiv 2409.04431), n the number of keys that a query sees.
    """

    def __init__(
        self, choice: Choice, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        parameter: Any = choice.normalizer.parameter
        self.normalizer, self.name = choice.normalizer.name, parameter.name
        self.low, self.high = parameter.fused_low, parameter.fused_high
        self.added = parameter.learned_from
        self.is_bounded = math.isfinite(self.low) and math.isfinite(self.high)
        start = 0.0 if self.added else parameter.default
        if self.is_bounded:
            start = math.log((start - self.low) / (self.high - start))
        self.raw = nn.Parameter(torch.full((heads,), start, device=device, dtype=dtype))

    @property
    def value(self) -> Tensor:
        """θ per head [H], in float32 or wider; without what is added to it by the number of keys."""
        wide = self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))
        return self.low + (self.high - self.low) * torch.sigmoid(wide) if self.is_bounded else wide

    def choose(self) -> Choice:
        """Return the normaliser with the present parameter."""
        value = self.value
        if self.added is None:
            return normalizers.get(self.normalizer, **{self.name: value[:, None, None]})
        count: Any = normalizers.get(self.normalizer).parameter.by_keys[self.added]
        return normalizers.get(self.normalizer, **{self.name: lambda n: value[:, None].to(n) + count(n)})

    def extra_repr(self) -> str:
        return f"{self.normalizer}, {self.name}, heads={self.raw.numel()}"
