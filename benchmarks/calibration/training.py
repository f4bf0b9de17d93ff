"""Trains the sound models of the calibration, a few seconds each, and keeps them at three stages."""

from __future__ import annotations

import argparse as some_module
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.calibration.zoo import MASK, START, Options, Zoo
from regard.health.models.tiny import encode

STAGES = (50, 150, 300)  # steps after which a model is kept
HELD_OUT = 0.1  # of a text, for examinations
MASKED = 0.2  # of the characters, for masked models


@dataclass(frozen=True)
class Recipe:
    """One sound model: its options, text and learning rate."""

    name: str
    options: dict = field(default_factory=dict)
    text: str = "plays"  # or "code"
    rate: float = 3e-3
    seed: int = 0


RECIPES = [
    Recipe("learned"),
    Recipe("learned, code", text="code", seed=1),
    Recipe("learned, 1e-3", rate=1e-3, seed=2),
    Recipe("learned, 2 layers of 2 heads", dict(layers=2, heads=2, kv_heads=2), seed=3),
    Recipe("learned, 4 layers", dict(layers=4), text="code", seed=4),
    Recipe("learned, 8 heads", dict(heads=8, kv_heads=8), seed=5),
    Recipe("learned, width 96", dict(width=96), seed=6),
    Recipe("learned, length 32", dict(length=32), seed=7),
    Recipe("learned, length 128", dict(length=128), text="code", seed=8),
    Recipe("learned, post-norm", dict(post_norm=True), rate=1e-3, seed=9),
    Recipe("learned, biases", dict(bias=True), seed=10),
    Recipe("learned, seed 11", seed=11),
    Recipe("rope", dict(positions="rope"), seed=12),
    Recipe("rope, code", dict(positions="rope"), text="code", seed=13),
    Recipe("rope, 4 layers", dict(positions="rope", layers=4), seed=14),
    Recipe("rope, length 128", dict(positions="rope", length=128), seed=15),
    Recipe("rope, QK-norm", dict(positions="rope", qk_norm=True), seed=16),
    Recipe("QK-norm", dict(qk_norm=True), seed=17),
    Recipe("QK-norm, code", dict(qk_norm=True), text="code", seed=18),
    Recipe("grouped", dict(kv_heads=2), seed=19),
    Recipe("grouped, code", dict(kv_heads=2), text="code", seed=20),
    Recipe("rope, grouped", dict(positions="rope", kv_heads=2), seed=21),
    Recipe("rope, one key head", dict(positions="rope", kv_heads=1), seed=22),
    Recipe("window", dict(window=16), seed=23),
    Recipe("rope, window", dict(positions="rope", window=16), text="code", seed=24),
    Recipe("masked", dict(kind="masked"), seed=25),
    Recipe("masked, code", dict(kind="masked"), text="code", seed=26),
    Recipe("masked, rope", dict(kind="masked", positions="rope"), seed=27),
    Recipe("masked, post-norm", dict(kind="masked", post_norm=True), rate=1e-3, seed=28),
    Recipe("seq2seq", dict(kind="seq2seq"), seed=29),
    Recipe("seq2seq, code", dict(kind="seq2seq"), text="code", seed=30),
    Recipe("no positions", dict(positions="none"), seed=31),
]


def read_texts(data: Path) -> dict[str, Tensor]:
    """The ids of both texts: `data`, and the source of a module of Python."""
    code = "".join(inspect.getsource(module) for module in (some_module, inspect))
    return dict(plays=encode(data.read_text(encoding="utf-8")), code=encode(code))


def split_text(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(for training, for examinations)."""
    cut = int(len(ids) * (1 - HELD_OUT))
    return ids[:cut], ids[cut:]


def draw_windows(ids: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """[count, length] windows at random places."""
    at = torch.randint(len(ids) - length, (count, 1), generator=generator)
    return ids[at + torch.arange(length)]


def hide_some(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ids with some replaced by MASK, where)."""
    hidden = torch.rand(ids.shape, generator=generator) < MASKED
    hidden[:, 0] = True
    return ids.masked_fill(hidden, MASK), hidden


def compute_loss(model: Zoo, windows: Tensor, generator: torch.Generator) -> Tensor:
    """The mean loss of the model's own task on windows of length + 1 characters."""
    kind = model.options.kind
    if kind == "causal":
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    if kind == "masked":
        given, hidden = hide_some(windows[:, 1:], generator)
        return F.cross_entropy(model(given)[hidden], windows[:, 1:][hidden])
    target = windows[:, 1:]
    shifted = F.pad(target[:, :-1], (1, 0), value=START)
    return F.cross_entropy(model(target, decoder_input_ids=shifted).flatten(0, 1), target.flatten())


def train(
    recipe: Recipe, texts: dict[str, Tensor], bugs: frozenset[str] = frozenset()
) -> Iterator[tuple[int, Zoo, float]]:
    """Yields (step, model, loss) at each stage."""
    torch.manual_seed(recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    model = Zoo(Options(**recipe.options, bugs=set(bugs)))
    ids, _ = split_text(texts[recipe.text])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate)
    for step in range(1, STAGES[-1] + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(1.0, step / 30)
        windows = draw_windows(ids, model.options.length + 1, 16, generator)
        loss = compute_loss(model, windows, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in STAGES:
            yield step, model.eval(), loss.item()
            model.train()


def load_or_train(
    recipe: Recipe, texts: dict[str, Tensor], cache: Path, bugs: frozenset[str] = frozenset()
) -> dict[int, dict]:
    """{step: (weights, loss)} of one model, from `cache` if it is there."""
    name = "+".join([recipe.name, *sorted(bugs)]).replace("/", "÷")
    path = cache / f"{name}.pt"
    if not path.exists():
        kept = {}
        for step, model, loss in train(recipe, texts, bugs):
            kept[step] = dict(weights={k: v.clone() for k, v in model.state_dict().items()}, loss=loss)
        torch.save(kept, path)
    return torch.load(path, weights_only=True)


def examination_batches(options: Options, ids: Tensor, count: int = 2, size: int = 6) -> list:
    """Batches of held-out text as the model takes them: ids, or a mapping for masked and seq2seq models."""
    generator = torch.Generator().manual_seed(1)
    _, held_out = split_text(ids)
    batches: list = []
    for _ in range(count):
        windows = draw_windows(held_out, options.length, size, generator)
        if options.kind == "seq2seq":
            shifted = F.pad(windows[:, :-1], (1, 0), value=START)
            batches.append(dict(input_ids=windows, decoder_input_ids=shifted))
        elif options.kind == "masked":
            given, hidden = hide_some(windows, generator)
            batches.append(dict(input_ids=given, targets=windows.masked_fill(~hidden, -100)))
        else:
            batches.append(windows)
    return batches


def masked_loss(model: Zoo, batch: dict) -> Tensor:
    """The mean loss of a masked model's hidden characters, as `examine` takes it."""
    logits = model(**batch)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
