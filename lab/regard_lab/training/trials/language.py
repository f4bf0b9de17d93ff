"""`LanguageModel`, a character language model with configurable attention, and `LanguageTrial`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.health.models.tiny import CHARACTERS
from regard.statistics import Statistics
from regard_lab.training.experiment import Setting, Trial
from regard_lab.training.trials import sharpness, text
from regard_lab.training.trials.attention import make_attention, mlp_width

SYMBOLS = len(CHARACTERS)


class Block(nn.Module):
    """x + attention(norm(x)), causal or over `items`, then x + mlp(norm(x))."""

    def __init__(
        self, width: int, heads: int, attention: Mapping[str, Any], index: int = 0, place: str = "causal"
    ) -> None:
        super().__init__()
        self.attention, self.causal = make_attention(width, heads, attention, place, index=index), place == "causal"
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        hidden = mlp_width(width, self.attention)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(
        self, x: Tensor, stats: tuple[str, ...] = (), items: tuple[Tensor, ...] = (), lengths: Tensor | None = None
    ) -> tuple[Tensor, Statistics | None]:
        options = {"is_causal": True} if self.causal else {"key_lengths": lengths}
        attended = self.attention(self.before_attention(x), *items, **options, return_stats=stats or False)
        attended, measured = attended if stats else (attended, None)
        x = x + attended
        return x + self.mlp(self.before_mlp(x)), measured


class LanguageModel(nn.Module):
    """Next-character logits [B, L, symbols]. Queries and keys start with unit variance, so q·k has variance d_k.

    `attention` holds options of `make_attention`: score, normalizer, temperature, softcap, sink, dropout, …
    """

    def __init__(
        self, layers: int, heads: int, width: int, length: int, attention: Mapping[str, Any], symbols: int = SYMBOLS
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(symbols, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention, index) for index in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.5 * width**-0.5)

    def forward(self, ids: Tensor, stats: tuple[str, ...] = ()):
        """Return logits, or (logits, one `Statistics` per layer) if `stats` names any."""
        x = self.token(ids) + self.position.weight[: ids.shape[-1]]
        measured = []
        for block in self.blocks:
            x, found = block(x, stats)
            measured.append(found)
        logits = self.head(self.norm(x))
        return (logits, measured) if stats else logits


class LanguageTrial(Trial):
    """Trains a `LanguageModel`.

    Options: layers, heads, width, length, batch, attention; rate, the highest learning rate; validation, how many
    characters an evaluation reads, the same ones each time; readings, False if it measures the loss alone.
    """

    symbols = SYMBOLS
    split = staticmethod(text.split_text)

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        self.setting, self.length, self.size = setting, options["length"], options["batch"]
        self.rate, self.validation = options.get("rate", Trial.rate), options.get("validation", 16_384)
        self.wanted = sharpness.WANTED if options.get("readings", True) else ()
        sizes = {name: options[name] for name in ("layers", "heads", "width", "length")}
        self.model = LanguageModel(**sizes, attention=options.get("attention", {}), symbols=self.symbols)
        self.model.to(setting.device)
        self.train, self.held_out = (part.to(setting.device) for part in self.split(setting.data))

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return (text.draw_windows(self.train, self.size, self.length, self.setting.generator(step)),)

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss in nats per character and the readings of `sharpness`."""
        loss, measured = self._measure()
        return {"loss": loss, **(sharpness.readings(measured) if self.wanted else {})}

    def finish(self) -> dict[str, Any]:
        return {"heads": sharpness.head_table(self._measure()[1])} if self.wanted else {}

    def _measure(self) -> tuple[float, list[Statistics]]:
        generator = torch.Generator().manual_seed(0)
        ids = text.draw_windows(self.held_out, max(1, self.validation // self.length), self.length, generator)
        result = self.model(ids[:, :-1], stats=self.wanted)
        logits, measured = result if self.wanted else (result, [])
        return float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())), measured
