"""Max retrieval: trained on rows of up to 16 items, tested on rows of up to 16384, with and without remedies.

Each item has a priority, uniform in [0, 1], and one of ten classes; the answer is the class of the item with the
highest priority. The model is that of arXiv 2410.01104: items through an MLP, one query, one head, an MLP for the
answer. The more items, the closer the second best: at n items some 1/n of a priority apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import MultiheadAttention
from regard.table import Table
from regard.temperature import Adaptive
from regard_lab.figure import Figure
from regard_lab.training.experiment import Experiment, Preset, Setting, Trial
from regard_lab.training.results import estimate, plus_minus

CLASSES = 10
TRAINED = 16  # items at most, unless an option says otherwise
PUBLISHED = {  # arXiv 2410.01104: items → % correct by softmax, and with the paper's polynomial
    16: (98.6, 98.6), 64: (94.3, 94.5), 256: (81.3, 82.1), 1024: (53.8, 57.7), 4096: (22.6, 24.9), 16384: (12.4, 14.0),
}  # fmt: skip
AFTERWARDS = {"published": Adaptive("published"), "refit": Adaptive("refit")}  # added after training
BATCH_ITEMS = 2**19  # items tested at once
AHEAD = 64  # steps whose rows are drawn at once
UNSEEN = 2**31  # added to the seeds of rows that are tested on; a generator keeps 32 bits of its seed
SMALL = Preset.small(200, 100, "softmax", 0.7, width=64, batch=128, tests=[16, 64, 256, 1024], items=2**15, rate=3e-3)
FULL = Preset(
    steps=3000, every=500, sizes=dict(width=128, batch=256, tests=list(PUBLISHED), items=2**22, rows=512, rate=2e-3)
)
SHOWN = ("softmax", "ssmax", "adaptive", "query-dependent", "qk-norm", "entmax15")  # six lines are distinguishable


class Retriever(nn.Module):
    """Priorities [B, N], classes [B, N] and row lengths [B] → logits over the classes [B, 10]."""

    def __init__(self, width: int, attention: dict) -> None:
        super().__init__()
        self.item = nn.Sequential(nn.Linear(1 + CLASSES, width), nn.GELU(), nn.Linear(width, width))
        self.query = nn.Parameter(torch.randn(1, 1, width))
        self.attention = MultiheadAttention(width, 1, **attention)
        self.answer = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES))

    def forward(self, priority: Tensor, kind: Tensor, lengths: Tensor | None = None) -> Tensor:
        items = torch.cat([priority[..., None], F.one_hot(kind, CLASSES).to(priority.dtype)], -1)
        query = self.query.expand(len(priority), -1, -1)
        return self.answer(self.attention(query, self.item(items), key_lengths=lengths)[:, 0])


class RetrievalTrial(Trial):
    """Trains a `Retriever`.

    Options: width, batch, attention; trained, the largest number of items in training; tests, the numbers of items
    tested; items, how many in all per test, in `rows` rows at least; afterwards, False to leave out the temperatures
    added after training.
    """

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        self.setting, self.size, self.rate = setting, options["batch"], options["rate"]
        self.tests, self.items = options["tests"], options["items"]
        self.trained, self.afterwards = options.get("trained", TRAINED), options.get("afterwards", True)
        self._chunk = -1
        self._rows: tuple[Tensor, ...] = ()
        self.model = Retriever(options["width"], options.get("attention", {})).to(setting.device)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        chunk, at = divmod(step, AHEAD)
        if chunk != self._chunk:
            rows = training_rows(self.setting.seed, chunk, self.size, self.trained)
            self._chunk, self._rows = chunk, tuple(x.to(self.setting.device) for x in rows)
        return tuple(x[at] for x in self._rows)

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        disable_tf32()
        priority, kind, lengths, right = batch
        return F.cross_entropy(self.model(priority, kind, lengths), right)

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the share of right answers on rows of the largest trained number of items."""
        priority, kind = self._test(self.trained, 1024)
        logits, right = self.model(priority, kind), answers(priority, kind)
        return {"loss": float(F.cross_entropy(logits, right)), "accuracy": share(logits, right)}

    def finish(self) -> dict[str, float]:
        """Return own@n, % correct as trained, and for softmax published@n and refit@n with that temperature added."""
        disable_tf32()
        attention, found = self.model.attention, {}
        plain = self.afterwards and attention.normalizer == "softmax" and attention.temperature is None
        for n in self.tests:
            for name, policy in {"own": attention.temperature, **(AFTERWARDS if plain else {})}.items():
                trained, attention.temperature = attention.temperature, policy
                found[f"{name}@{n}"] = 100.0 * self._accuracy(n)
                attention.temperature = trained
        return found

    def _accuracy(self, n: int) -> float:
        rows = max(self.setting.options.get("rows", 64), min(4096, self.items // n))
        priority, kind = self._test(n, rows, self.setting.seed)
        right = answers(priority, kind)
        parts = zip(*(x.split(max(1, BATCH_ITEMS // n)) for x in (priority, kind)), strict=True)
        return share(torch.cat([self.model(*part) for part in parts]), right)

    def _test(self, n: int, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
        return tuple(x.to(self.setting.device) for x in testing_rows(rows, n, seed))


def disable_tf32() -> None:
    """Disable TF32, because scores must distinguish priorities 1/n apart."""
    torch.backends.cuda.matmul.allow_tf32 = False


@lru_cache(maxsize=8)
def training_rows(seed: int, chunk: int, size: int, most: int) -> tuple[Tensor, ...]:
    """Return (priorities, classes, lengths, answers) of the steps of one chunk, shared by variants of one seed."""
    generator = Setting({}, seed).generator(chunk)
    priority, kind = draw(AHEAD * size, most, generator)
    lengths = torch.randint(1, most + 1, (AHEAD * size,), generator=generator)
    priority = priority * (torch.arange(most) < lengths[:, None])
    return tuple(x.unflatten(0, (AHEAD, size)) for x in (priority, kind, lengths, answers(priority, kind)))


@lru_cache(maxsize=8)
def testing_rows(rows: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows of n items, the same for every variant, from seeds that no training step uses."""
    return draw(rows, n, torch.Generator().manual_seed(UNSEEN + seed * 1_000_003 + n))


def draw(rows: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw priorities [rows, n] and classes [rows, n]."""
    return torch.rand(rows, n, generator=generator), torch.randint(CLASSES, (rows, n), generator=generator)


def answers(priority: Tensor, kind: Tensor) -> Tensor:
    """Return the class of the item with the highest priority [rows]."""
    return kind.gather(1, priority.argmax(1, keepdim=True))[:, 0]


def share(logits: Tensor, right: Tensor) -> float:
    """Return the share of right answers."""
    return float((logits.argmax(-1) == right).double().mean())


def curve(result: dict, variant: str, how: str) -> tuple[list, ...]:
    """Return (n, low, mean, high) of the share correct, for a figure of bands."""
    numbers = result["summary"][variant]
    tests = sorted(int(name.split("@")[1]) for name in numbers if name.startswith(f"{how}@"))
    return (tests, *([numbers[f"{how}@{n}"].get(side) for n in tests] for side in ("low", "mean", "high")))


def accuracy_table(result: dict, rows: dict[str, tuple[str, str]], more: dict[str, dict[int, str]]) -> Table:
    """Return % correct with intervals over seeds, a column per number of items.

    `rows` is name → (variant, how); `more` is name → cells of further rows.
    """
    cells = {
        name: {n: f"{mean:.1f} ± {(high - low) / 2:.1f}" if low is not None else f"{mean:.1f}"
               for n, low, mean, high in zip(*curve(result, *of), strict=True)}
        for name, of in rows.items()
    }  # fmt: skip
    tests = list(next(iter(cells.values())))
    lines = [[name, *(line.get(n, "") for n in tests)] for name, line in {**cells, **more}.items()]
    return Table(["items", *map(str, tests)], lines, numbers=[*map(str, tests)])


def table(result: dict) -> Table:
    """Return published and our accuracies, and the gain of the refit over the published polynomial."""
    runs = [r["final"] for r in result["records"] if not r["diverged"]]
    tests = [n for n in PUBLISHED if f"refit@{n}" in runs[0]]
    wins = {n: plus_minus(estimate([run[f"refit@{n}"] - run[f"published@{n}"] for run in runs])) for n in tests}
    names = enumerate(("paper, softmax", "paper, with its polynomial"))
    paper = {name: {n: f"{PUBLISHED[n][at]:.1f}" for n in tests} for at, name in names}
    ours = {"softmax": "own", "with the published polynomial": "published", "with the refit": "refit"}
    rows = {f"ours, {name}": ("softmax", how) for name, how in ours.items()}
    return accuracy_table(result, rows, {**paper, "refit − published polynomial": wins})


def accuracy_figure(lines: dict) -> Figure:
    """Draw % correct against the number of items."""
    words = "; ".join(f"{name} {', '.join(f'{y:.3g}' for y in line[2])}" for name, line in lines.items())
    tests = ", ".join(map(str, next(iter(lines.values()))[0]))
    return Figure("bands", "items", "% correct", lines, log="x", alt=f"% correct at {tests} items: {words}.")


def figures(result: dict) -> dict[str, Figure]:
    """Draw accuracy against n: ours, with a temperature added after training, and the published curves."""
    hows = {"softmax": "own", "with the published β": "published", "with the refit": "refit"}
    lines = {name: curve(result, "softmax", how) for name, how in hows.items()}
    known = [n for n in lines["softmax"][0] if n in PUBLISHED]
    for at, name in enumerate(("paper, softmax", "paper, with its β")):
        lines[name] = (known, *[[PUBLISHED[n][at] for n in known]] * 3)
    return {"afterwards": accuracy_figure(lines)}


experiment = Experiment(
    name="retrieval",
    question="Trained on 16 items, how far does max retrieval reach, and how much further with a temperature put in?",
    variants={"softmax": {"attention": {}}},
    make=RetrievalTrial,
    presets={
        "small": SMALL,
        "full": replace(FULL, seeds=24),  # what the two polynomials are apart varies by 6 points from seed to seed
    },
    figures=figures,
    table=table,
    reads="",
    metric="refit@1024",
)


def table_by_variant(result: dict) -> Table:
    """Return % correct of each variant."""
    return accuracy_table(result, {name: (name, "own") for name in result["summary"]}, {})


def figures_by_variant(result: dict, shown: Sequence[str] = SHOWN) -> dict[str, Figure]:
    """Draw % correct of the variants against the number of items."""
    return {"length": accuracy_figure({n: curve(result, n, "own") for n in shown if n in result["summary"]})}


trained = Experiment(
    name="retrieval-trained",
    question="Trained on 16 items with a remedy in the model, how far does max retrieval reach?",
    variants={
        "softmax": {"attention": {}},
        "ssmax": {"attention": {"temperature": "ssmax"}},
        "adaptive": {"attention": {"temperature": "adaptive"}},
        "query-dependent": {"attention": {"temperature": "query_dependent"}},
        "qk-norm": {"attention": {"score": "cosine"}},
        "entmax15": {"attention": {"normalizer": "entmax15"}},
        "sparsemax": {"attention": {"normalizer": "sparsemax"}},
        "entmax15-ssmax": {"attention": {"normalizer": "entmax15", "temperature": "ssmax"}},
    },
    make=RetrievalTrial,
    presets={"small": replace(SMALL, learner="ssmax"), "full": FULL},
    figures=figures_by_variant,
    table=table_by_variant,
    reads="",
    metric="own@1024",
)
