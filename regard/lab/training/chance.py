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


class Chance:
    """While `with chance:` lasts, torch's generators go on where this run left them; then the caller's are back.

    On CUDA the generator's state itself changes places, not its numbers: a graph reads them while it runs, perhaps when
    the next run has taken its turn already.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.own = torch.get_rng_state()
        self.cuda = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.cuda = torch.cuda.default_generators[index]
            self.own_cuda = self.cuda.clone_state()
        with self:
            torch.manual_seed(seed)

    def __enter__(self) -> None:
        self.others = torch.get_rng_state()
        torch.set_rng_state(self.own)
        if self.cuda is not None:
            self.others_cuda = self.cuda.graphsafe_get_state()
            self.cuda.graphsafe_set_state(self.own_cuda)

    def __exit__(self, *_) -> None:
        self.own = torch.get_rng_state()
        torch.set_rng_state(self.others)
        if self.cuda is not None:
            self.cuda.graphsafe_set_state(self.others_cuda)
