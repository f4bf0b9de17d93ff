"""`Adaptive`: a temperature computed from the row's entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard._call.scores import is_real
from regard.temperature.rows import Rows


class Adaptive(nn.Module):
    """T = 1 / max(β(H), 1): sharpens rows of high entropy H (arXiv 2410.01104).

    β is a polynomial with coefficients from the highest power down. Two have names: "published" is the paper's, of
    degree 4, which falls below 1 above H ≈ 5.94 and so has no effect on long rows; "refit" is ours,
    β = 1 + 0.871·(H − ½), which never falls (derived in `docs/remedies.md`).

    >>> import regard, torch
    >>> long = {"entropy": torch.tensor([0.4, 2.0, 8.0])}
    >>> for fit in ("published", "refit"):
    ...     print(regard.temperature.Adaptive(fit)(None, lambda names: long))
    tensor([1.0000, 0.4764, 1.0000])
    tensor([1.0000, 0.4336, 0.1328])

    Args:
        fit: "refit", "published" or the coefficients of β.
        floor: rows with H ≤ floor keep T = 1.

    The entropy costs one more fused pass. It is part of the gradient for softmax and softmax1; for other normalisers T
    is a constant in backward. The policy has no parameters and can be used in a model that was trained without it.
    """

    published = (-0.037, 0.481, -2.3, 4.917, -1.791)
    refit = (0.871, 0.5645)

    def __init__(self, fit: str | Sequence[float] = "refit", floor: float = 0.5) -> None:
        super().__init__()
        known = {"refit": self.refit, "published": self.published}
        if isinstance(fit, str) and fit not in known:
            raise ValueError(f"fit must be 'refit', 'published' or the coefficients of a polynomial, got {fit!r}")
        try:
            self.coefficients = tuple(float(c) for c in (known[fit] if isinstance(fit, str) else fit))
        except (TypeError, ValueError):
            raise TypeError(f"fit must be 'refit', 'published' or a sequence of numbers, got {fit!r}") from None
        if not self.coefficients or not all(map(math.isfinite, self.coefficients)):
            raise ValueError(f"fit must hold at least one finite coefficient, got {fit!r}")
        if not (is_real(floor) and 0 <= floor < math.inf):
            raise ValueError(f"floor must be an entropy ≥ 0, got {floor!r}")
        self.floor = float(floor)

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        entropy = rows(("entropy",))["entropy"]
        beta = torch.zeros_like(entropy)
        for coefficient in self.coefficients:
            beta = beta * entropy + coefficient
        beta = torch.where(entropy > self.floor, beta.clamp_min(1.0), 1.0)
        return 1.0 / beta

    def extra_repr(self) -> str:
        return f"{self.coefficients}, floor={self.floor:g}"
