"""A look at every step that costs nothing measurable: is all finite, how large are the largest logits of a few rows?

The taps (`taps.py`) look at 16 rows of one sequence in each attention call; of the model's output, one number per row
is summed, or its loss read. What they find stays on the device and is fetched while the next step runs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.measure.side_stream import HostCopies
from regard.health.watching import taps


class Pulse:
    """The looks at the steps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.taps = taps.Taps(model, whole=True, eagerly=True)
        self.largest = -math.inf  # of the step that was read last; NaN where a logit was not finite
        self.is_finite = True  # was its output?
        self.step: int | None = None  # whose numbers were read last
        self.layers: dict[str, Tensor] = {}  # what the taps of the last forward held
        self._copies = HostCopies()

    def end_forward(self, step: int, output: Any) -> None:
        """Starts to fetch what the forward has left."""
        self.layers = self.taps.read()
        found = [held.amax() for held in self.layers.values()]
        flag = _sum_of(output)
        if not found and flag is None:
            return
        device = found[0].device if found else flag.device  # type: ignore[union-attr]
        top = torch.stack([x.to(device) for x in found]).amax() if found else torch.tensor(-math.inf, device=device)
        flag = torch.zeros((), device=device) if flag is None else flag.to(device)
        self._copies.add(torch.stack([top.float(), flag.float()]), partial(self._receive, step=step))
        self._copies.start()

    def read(self) -> bool:
        """Reads what the last forward has left; True if there was anything."""
        before = self.step
        self._copies.finish()
        return self.step != before

    def _receive(self, numbers: Tensor, step: int) -> None:
        self.largest, total = numbers.tolist()
        self.is_finite, self.step = math.isfinite(total) and not math.isnan(self.largest), step

    def has_seen(self) -> bool:
        """True if a call was made since the last look: of a step whose forward ran in a graph."""
        return self.taps.has_seen()

    def close(self) -> None:
        self.taps.close()


def _sum_of(output: Any) -> Tensor | None:
    """Returns the loss of an output, or the sum of the first entries of its rows: finite if they are."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()).float()
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
    x = next((x for x in parts if isinstance(x, Tensor) and x.is_floating_point() and x.numel()), None)
    if x is None or taps.is_unreadable(x):
        return None
    with torch.no_grad():
        return (x.detach()[..., 0] if x.ndim > 1 else x.detach()).sum(dtype=torch.float32).reshape(())
