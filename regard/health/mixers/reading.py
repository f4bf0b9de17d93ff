"""`MixerReading`: what one mixer adds to the residual stream, and how long it remembers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SHUT = 0.01  # a decay below this forgets what came before at once; a write gate below it writes nothing
OPEN = 1.0 - 1e-4  # a decay above this keeps all: e-folding after 10,000 tokens


class MixerReading:
    """Sums over the forwards of an examination.

    Attributes:
        layer: the module's name in the model.
        kind: "GatedDeltaNet", "Mamba2", "RG-LRU", …; the class's name where nothing more is known of it.
        failure: why it was not read, None if it was.
    """

    def __init__(self, layer: str, kind: str) -> None:
        self.layer, self.kind = layer, kind
        self.failure: str | None = None
        self._sizes: Tensor | None = None  # Σ x², Σ y², number of entries of x, of y
        self._decays: Tensor | None = None  # per channel: Σ log a, of a: shut, kept open, number
        self._writes: Tensor | None = None  # Σ b, shut, number

    def add_sizes(self, x: Tensor, y: Tensor) -> None:
        """Adds an input and an output of the mixer."""
        sums = torch.stack([x.double().square().sum(), y.double().square().sum()])
        counts = torch.tensor([x.numel(), y.numel()], dtype=torch.float64, device=x.device)
        self._sizes = _plus(self._sizes, torch.cat([sums, counts]))

    def add_gates(self, log_decay: Tensor | None, write: Tensor | None = None) -> None:
        """Adds log decays [tokens, channels], at most 0, and write gates in [0, 1] of any shape."""
        if log_decay is not None:
            d = log_decay.double().flatten(0, -2)
            parts = d.sum(0), (d < math.log(SHUT)).double().sum(0), (d > math.log(OPEN)).double().sum(0)
            self._decays = _plus(self._decays, torch.stack([*parts, torch.full_like(d[0], len(d))]))
        if write is not None:
            w = write.double()
            self._writes = _plus(
                self._writes, torch.stack([w.sum(), (w < SHUT).double().sum(), w.new_tensor(w.numel())])
            )

    @property
    def is_read(self) -> bool:
        """True if a forward reached it and nothing of ours failed."""
        return self.failure is None and self._sizes is not None

    @property
    def numbers(self) -> dict[str, float]:
        """Root mean squares of input and output, and what is known of decays and write gates."""
        if self._sizes is None:
            return {}
        x, y, entries_x, entries_y = self._sizes.tolist()
        numbers = dict(input_rms=math.sqrt(x / max(entries_x, 1)), output_rms=math.sqrt(y / max(entries_y, 1)))
        if self._decays is not None:
            logs, shut, kept, count = self._decays
            memory = -1.0 / (logs / count).clamp_max(-1e-12)  # tokens after which e⁻¹ is left, per channel
            numbers |= dict(
                memory_median=float(memory.median()), memory_min=float(memory.min()), memory_max=float(memory.max()),
                decay_shut=float(shut.sum() / count.sum()), decay_open=float(kept.sum() / count.sum()),
            )  # fmt: skip
        if self._writes is not None:
            total, shut, count = self._writes.tolist()
            numbers |= dict(write_mean=total / count, write_shut=shut / count)
        return numbers

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; those that are not finite are None."""
        numbers = {name: x if math.isfinite(x) else None for name, x in self.numbers.items()}
        return dict(layer=self.layer, kind=self.kind, failure=self.failure, numbers=numbers)


def _plus(sums: Tensor | None, more: Tensor) -> Tensor:
    return more if sums is None else sums + more.to(sums.device)
