"""Random numbers of one run, kept apart from those of runs that take turns with it.

>>> from regard.lab.training.chance import Chance
>>> runs = [Chance(seed, torch.device("cpu")) for seed in (0, 1)]
>>> def draw(chance):
...     with chance:
...         return round(torch.rand(()).item(), 4)
>>> in_turn = [draw(chance) for _ in range(2) for chance in runs]
>>> alone = Chance(1, torch.device("cpu"))
>>> in_turn[1::2] == [draw(alone), draw(alone)]
True
"""

from __future__ import annotations

import torch
from torch import Tensor


class Chance:
    """While `with chance:` lasts, torch's generators go on where this run left them; then the caller's are back."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None
        before = self._states()
        torch.manual_seed(seed)
        self.own = self._states()
        self._set(before)

    def __enter__(self) -> None:
        self.others = self._states()
        self._set(self.own)

    def __exit__(self, *_) -> None:
        self.own = self._states()
        self._set(self.others)

    def _states(self) -> list[Tensor]:
        cpu = torch.get_rng_state()
        return [cpu] if self.device is None else [cpu, torch.cuda.get_rng_state(self.device)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device is not None:
            torch.cuda.set_rng_state(states[1], self.device)
