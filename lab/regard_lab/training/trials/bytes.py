"""`ByteTrial`: a decoder over the bytes of a large file, in bfloat16 autocast; the loss of each validation window."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard_lab.training.comparison import WINDOWS
from regard_lab.training.trials import text
from regard_lab.training.trials.language import LanguageTrial

HELD_OUT = 0.02  # of the bytes, at the end of the file
TOGETHER = 64  # windows evaluated at once


@cache
def split_bytes(data: Path | None) -> tuple[Tensor, Tensor]:
    """Return the bytes for training and, from the end of the file, for validation, as uint8."""
    whole = text.generate(4000).encode() if data is None else data.read_bytes()
    if len(whole) < 65_536:
        raise ValueError(f"--data {data} has {len(whole)} bytes, too few to train on; give 65536 or more")
    ids = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    end = int(len(ids) * (1 - HELD_OUT))
    return ids[:end], ids[end:]


class ByteTrial(LanguageTrial):
    """Trains a `LanguageModel` over bytes. Option windows: how many of them an evaluation reads, the same ones."""

    graph = False  # a step is long enough to hide its launches
    symbols = 256
    split = staticmethod(split_bytes)

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self._losses(batch[0]).mean()

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss in nats per byte."""
        return {"loss": float(self._window_losses().mean())}

    def finish(self) -> dict[str, Any]:
        return {WINDOWS: self._window_losses().tolist()}

    def _losses(self, ids: Tensor) -> Tensor:
        """Return the mean loss of each row [B]."""
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            logits = self.model(ids[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.view(len(ids), -1).mean(1)

    def _window_losses(self) -> Tensor:
        windows, generator = self.setting.options["windows"], torch.Generator().manual_seed(0)
        ids = text.draw_windows(self.held_out, windows, self.length, generator)
        return torch.cat([self._losses(part) for part in ids.split(TOGETHER)])
