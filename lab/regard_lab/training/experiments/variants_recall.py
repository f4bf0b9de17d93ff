"""What wins in associative recall beyond the trained length: up to 256 items in training, up to 8192 in the test.

An item has a key of six symbols and a value of one; a query has a key, and its answer is the value of the item with
that key, which is always there once. The more items there are, the more of them nearly match: among 8192 items of
15,625 possible keys a query has some twelve neighbours that differ in one symbol and 126 that differ in two, among 256
on average 0.4 and 4. There are no positions (the order of items means nothing); queries attend to items, two layers,
and the number of items varies from 8 to 256 in training, so that a temperature that depends on it can learn.

The task is the associative recall of arXiv 2506.16640 with an item in one token, so that it asks of attention only
that it finds one key among many.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard_lab.training.experiment import Experiment, Preset, Setting, Trial
from regard_lab.training.experiments.variants_length import COMPARED, TESTS, figures, table
from regard_lab.training.trials.attention import compared
from regard_lab.training.trials.language import Block

SYMBOLS, PLACES, VALUES = 5, 6, 16
KEYS = SYMBOLS**PLACES
FEWEST, TRAINED = 8, 256  # items in training
AT_ONCE = 2**18  # items tested at once
UNSEEN = 2**31  # added to the seeds of rows that are tested on


class Recaller(nn.Module):
    """Codes [B, N] and values [B, N] of items, codes [B, M] of queries → logits over values [B, M, 16].

    A code is a number below 15,625, its key the six digits in base 5; a key's embedding is the sum over its symbols.
    """

    spelling: Tensor

    def __init__(self, layers: int, heads: int, width: int, attention: Mapping[str, Any]) -> None:
        super().__init__()
        self.register_buffer("spelling", spell(torch.arange(KEYS)), persistent=False)
        self.symbol = nn.Linear(PLACES * SYMBOLS, width, bias=False)
        self.value = nn.Embedding(VALUES, width)
        self.layers = nn.ModuleList(Block(width, heads, attention, place="cross") for _ in range(layers))
        self.item_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, VALUES, bias=False)
        nn.init.normal_(self.symbol.weight)

    def forward(self, codes: Tensor, values: Tensor, queries: Tensor, lengths: Tensor | None = None) -> Tensor:
        items = self.item_norm(self.symbol(self.spelling[codes]) + self.value(values))
        x = self.symbol(self.spelling[queries])
        for layer in self.layers:
            x, _ = layer(x, items=(items,), lengths=lengths)
        return self.head(self.norm(x))


class RecallTrial(Trial):
    """Trains a `Recaller`.

    Options: layers, heads, width, batch, queries per row, attention, rate; tests, the numbers of items tested, with
    `rows` rows each.
    """

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        self.setting, self.size, self.queries = setting, options["batch"], options["queries"]
        self.rate, self.tests, self.rows = options["rate"], options["tests"], options["rows"]
        sizes = {name: options[name] for name in ("layers", "heads", "width")}
        self.model = Recaller(**sizes, attention=options["attention"]).to(setting.device)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        rows = training_rows(self.setting.seed, step, self.size, self.queries)
        return tuple(x.to(self.setting.device) for x in rows)

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        codes, values, lengths, queries, answers = batch
        return F.cross_entropy(self.model(codes, values, queries, lengths).flatten(0, 1), answers.flatten())

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the share of right answers at the longest trained length."""
        loss, accuracy = self._test(TRAINED)
        return {"loss": loss, "accuracy": accuracy}

    def finish(self) -> dict[str, float]:
        """Return own@n, % correct with n items, and loss@n."""
        found = {n: self._test(n) for n in self.tests}
        losses = {f"loss@{n}": loss for n, (loss, _) in found.items()}
        return losses | {f"own@{n}": 100.0 * accuracy for n, (_, accuracy) in found.items()}

    def _test(self, n: int) -> tuple[float, float]:
        rows = [x.to(self.setting.device) for x in testing_rows(self.setting.seed, self.rows, n, self.queries)]
        parts = zip(*(x.split(max(1, AT_ONCE // n)) for x in rows), strict=True)
        logits = torch.cat([self.model(codes, values, queries) for codes, values, queries, _ in parts])
        right = (logits.argmax(-1) == rows[-1]).double().mean()
        return float(F.cross_entropy(logits.flatten(0, 1), rows[-1].flatten())), float(right)


def training_rows(seed: int, step: int, size: int, queries: int) -> tuple[Tensor, ...]:
    """Return (codes, values, lengths, queries, answers) of a step, the same for every variant of a seed."""
    generator = Setting({}, seed).generator(step)
    lengths = torch.randint(FEWEST, TRAINED + 1, (size,), generator=generator, dtype=torch.int32)
    codes, values, asked, answers = draw(size, TRAINED, queries, generator, lengths)
    return codes, values, lengths, asked, answers


def testing_rows(seed: int, rows: int, n: int, queries: int) -> tuple[Tensor, ...]:
    """Return (codes, values, queries, answers) of rows of n items, the same for every variant of a seed."""
    generator = torch.Generator().manual_seed(UNSEEN + seed * 1_000_003 + n)
    return draw(rows, n, queries, generator, torch.full((rows,), n))


def draw(rows: int, n: int, queries: int, generator: torch.Generator, lengths: Tensor) -> tuple[Tensor, ...]:
    """Draw n distinct codes with values [rows, n], and queries [rows, queries] for the first `lengths` with theirs."""
    order = torch.randperm(KEYS, generator=generator)
    start, shift = torch.randint(KEYS, (2, rows, 1), generator=generator)
    codes = (order[(start + torch.arange(n)) % KEYS] + shift) % KEYS  # a part of the order, renamed by the shift
    values = torch.randint(VALUES, (rows, n), generator=generator)
    chosen = (torch.rand(rows, queries, generator=generator) * lengths[:, None]).long()
    return codes, values, codes.gather(1, chosen), values.gather(1, chosen)


def spell(codes: Tensor) -> Tensor:
    """Return six ones among 30 for each code [N, 30]: one of five symbols at each of six places."""
    symbols = torch.stack([codes // SYMBOLS**place % SYMBOLS for place in range(PLACES)], -1)
    return F.one_hot(symbols, SYMBOLS).flatten(-2).float()


experiment = Experiment(
    name="variants-recall",
    question="Trained to find one key among 256, which kind of attention still finds it among 8192?",
    variants=compared(TRAINED, COMPARED),
    make=RecallTrial,
    presets={
        "small": Preset.small(
            150,
            75,
            "softmax",
            1.0,
            layers=1,
            heads=2,
            width=64,
            batch=32,
            queries=16,
            rate=5e-3,
            rows=8,
            tests=TESTS[:2],
        ),
        "full": Preset(
            steps=1000,
            every=500,
            sizes=dict(layers=2, heads=4, width=128, batch=64, queries=32, rate=2e-3, rows=64, tests=TESTS),
            seeds=5,
        ),
    },
    figures=figures,
    table=table,
    reads="",
    metric="own@8192",
)
