"""`Translator`, an encoder-decoder with configurable attention, and `TranslationTrial`: loss and BLEU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard_lab.training.experiment import Setting, Trial
from regard_lab.training.trials import sharpness
from regard_lab.training.trials.attention import make_attention, mlp_width
from regard_lab.training.trials.pairs import BEGIN, END, PAD, corpus


class Layer(nn.Module):
    """x + self-attention, x + cross-attention if `crossed`, x + mlp, each after a norm."""

    def __init__(
        self, width: int, heads: int, crossed: bool, dropout: float, attention: Mapping[str, Any], index: int
    ) -> None:
        super().__init__()
        self.own = make_attention(width, heads, attention, "causal" if crossed else "self", True, index)
        self.cross = make_attention(width, heads, attention, "cross", True, index) if crossed else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if crossed else 2))
        hidden = 4 * width - sum(4 * width - mlp_width(width, x) for x in (self.own, self.cross) if x is not None)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor | None, source: Tensor | None, source_lengths, stats, measured):
        def attend(kind, module, *inputs, **options):
            out = module(*inputs, **options, return_stats=stats or False)
            if stats:
                out, found = out
                measured.append((kind, found))
            return self.drop(out)

        kind = "encoder" if self.cross is None else "decoder"
        x = x + attend(kind, self.own, self.norms[0](x), is_causal=self.cross is not None, key_lengths=lengths)
        if self.cross is not None:
            x = x + attend("cross", self.cross, self.norms[1](x), source, key_lengths=source_lengths)
        return x + self.drop(self.mlp(self.norms[-1](x)))


class Translator(nn.Module):
    """Next-word logits [B, M, words] for targets [B, M] given sources [B, N]; id 0 is padding, at the end."""

    def __init__(
        self, words: int, target_words: int, layers: int, heads: int, width: int, length: int, dropout: float,
        attention: Mapping[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(target_words, width)
        self.places = nn.Parameter(torch.randn(2, length, width) * width**-0.5)
        self.encoder = nn.ModuleList(Layer(width, heads, False, dropout, attention, i) for i in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, True, dropout, attention, i) for i in range(layers))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.drop = nn.Dropout(dropout)
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def encode(self, source: Tensor, stats=(), measured=None) -> tuple[Tensor, Tensor]:
        """Return the encoded source [B, N, width] and its lengths [B]."""
        lengths = (source != PAD).sum(-1, dtype=torch.int32)
        x = self.drop(self.source(source) * self.places.shape[-1] ** 0.5 + self.places[0, : source.shape[1]])
        for layer in self.encoder:
            x = layer(x, lengths, None, None, stats, measured)
        return self.norms[0](x), lengths

    def decode(self, target: Tensor, encoded: Tensor, lengths: Tensor, stats=(), measured=None) -> Tensor:
        """Return the states [B, M, width] that `words` turns into logits."""
        x = self.drop(self.target(target) * self.places.shape[-1] ** 0.5 + self.places[1, : target.shape[1]])
        for layer in self.decoder:
            x = layer(x, None, encoded, lengths, stats, measured)
        return self.norms[1](x)

    def words(self, decoded: Tensor) -> Tensor:
        """Return logits over the target words."""
        return decoded @ self.target.weight.T

    def forward(self, source: Tensor, target: Tensor, stats: tuple[str, ...] = ()):
        """Return logits, or (logits, [(kind, Statistics)]) with kind "encoder", "decoder" or "cross"."""
        measured: list = []
        encoded, lengths = self.encode(source, stats, measured)
        logits = self.words(self.decode(target, encoded, lengths, stats, measured))
        return (logits, measured) if stats else logits

    def greedy(self, source: Tensor, length: int) -> Tensor:
        """Translate greedily: ids [B, length], always of full length, so that one kernel shape is compiled."""
        encoded, lengths = self.encode(source)
        out = source.new_full((len(source), length), PAD)
        out[:, 0] = BEGIN
        over = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for i in range(1, length):
            word = self.words(self.decode(out, encoded, lengths)[:, i - 1]).argmax(-1)
            out[:, i] = torch.where(over, PAD, word)
            over = over | (word == END)
            if bool(over.all()):
                break
        return out


class TranslationTrial(Trial):
    """Trains a `Translator`.

    Options: layers, heads, width, length, batch, dropout, smoothing, attention, rate; readings, False if an evaluation
    measures the loss alone.
    """

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        self.setting, self.size, self.length = setting, options["batch"], options["length"]
        self.rate, self.smoothing = options.get("rate", 1e-3), options.get("smoothing", 0.1)
        self.readings = options.get("readings", True)
        self.corpus = corpus(setting.data)
        sizes = {name: options[name] for name in ("layers", "heads", "width", "length", "dropout")}
        words = len(self.corpus.source.words), len(self.corpus.target.words)
        self.model = Translator(*words, **sizes, attention=options.get("attention", {})).to(setting.device)
        parts = (self.corpus.train, self.corpus.val, self.corpus.test)
        pairs = ([x.to(setting.device) for x in self.corpus.tensors(part, self.length)] for part in parts)
        self.train, self.val, self.test = pairs

    def batch(self, step: int) -> tuple[Tensor, ...]:
        rows = torch.randint(len(self.train[0]), (self.size,), generator=self.setting.generator(step))
        rows = rows.to(self.setting.device)
        return self.train[0][rows], self.train[1][rows]

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self._loss(self.model(batch[0], batch[1][:, :-1]), batch[1], self.smoothing)

    def _loss(self, logits: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=smoothing
        )

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss in nats per word, and readings of all attentions and of the cross ones."""
        source, target = (x[:256] for x in self.val)
        if not self.readings:
            return {"loss": float(self._loss(self.model(source, target[:, :-1]), target))}
        logits, measured = self.model(source, target[:, :-1], stats=sharpness.WANTED)
        rows = {"encoder": source != PAD, "decoder": target[:, 1:] != PAD, "cross": target[:, 1:] != PAD}
        readings = sharpness.readings([stats for _, stats in measured], [rows[kind] for kind, _ in measured])
        cross = [(stats, rows[kind]) for kind, stats in measured if kind == "cross"]
        crossed = sharpness.readings(*map(list, zip(*cross, strict=True)))
        return {"loss": float(self._loss(logits, target)), **readings, "cross_entropy_ratio": crossed["entropy_ratio"]}

    def finish(self) -> dict[str, Any]:
        """Return BLEU of greedy translations of the test part, on its own tokens."""
        from sacrebleu import corpus_bleu

        outputs = []
        for rows in self.test[0].split(500):
            outputs += [self.corpus.target.decode(ids) for ids in self.model.greedy(rows, self.length).tolist()]
        references = [target for _, target in self.corpus.test]
        return {"bleu": corpus_bleu(outputs, [references], tokenize="none", force=True).score, "examples": outputs[:3]}
