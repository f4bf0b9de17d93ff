"""How early a Monitor speaks: small trainings driven into failure in different ways, and sound ones beside them.

python benchmarks/early_warning.py [--steps 200] [--only WORD] [--markdown FILE] [--logs FOLDER]

Each run trains a character model of 2 to 4 layers on regard's own source under `regard.Monitor(model, every=100)` with
its defaults, on one thread. The loss shows a failure at the first step from which on the mean of its last ten values is
0.4 above the lowest such mean so far, or is NaN, or, after step 50, is 0.4 above the same mean of the sound twin (the
same model, sane settings), which a user does not have. Lead: steps from the first warning to that step.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

LENGTH, BATCH, MARGIN, WINDOW, TWIN_FROM = 48, 6, 0.4, 10, 50


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, scale: float | None, bf16: bool, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.scale, self.bf16, self.is_normed, self.is_causal = heads, scale, bf16, qk_norm, True
        self.mask: Tensor | None = None  # in place of the causal one
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.is_normed:
            q, k = (F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 for x in (q, k))
        if self.bf16:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        mask = self.mask if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        causal = self.is_causal and mask is None
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        return self.out(o.to(x.dtype).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, post_norm: bool, **options) -> None:
        super().__init__()
        self.attention, self.post_norm = Attention(width, **options), post_norm
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, (self.attention, self.mlp), strict=True):
            x = norm(x + layer(x)) if self.post_norm else x + layer(norm(x))
        return x


class Model(nn.Module):
    def __init__(self, layers=2, width=64, heads=4, scale=None, bf16=False, post_norm=False, qk_norm=False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        options = dict(heads=heads, scale=scale, bf16=bf16, qk_norm=qk_norm)
        self.blocks = nn.Sequential(*(Block(width, post_norm, **options) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


FAILING_HEAD = "| how | run | final loss (twin) | loss shows it | first warning | lead | what it said |"
FAILING_RULE = "| --- | --- | --- | ---: | ---: | ---: | --- |"
SOUND_HEAD, SOUND_RULE = "| run | final loss | samples | warnings |", "| --- | ---: | ---: | --- |"
Corrupt = Callable[[Tensor, int], Tensor]


@dataclass
class Run:
    """One training: what is wrong with it, and its settings."""

    name: str
    way: str  # "sound", or how it was driven into failure
    seed: int = 0
    rate: float = 2e-3
    warmup: int = 20
    clip: float | None = 1.0
    jump: tuple[int, float] | None = None  # from this step on, the rate times this
    growth: float = 1.0  # factor of the rate per step
    corrupt: Corrupt | None = None
    optimizer: str = "adamw"
    model: dict = field(default_factory=dict)

    def twin(self) -> Run:
        """The same model with sane settings."""
        sane = {name: value for name, value in self.model.items() if name not in ("scale", "bf16")}
        return Run(
            f"twin, {', '.join(f'{name}={value}' for name, value in sane.items()) or 'plain'}", "sound", model=sane
        )


def shuffle_tokens(ids: Tensor, step: int) -> Tensor:
    """From step 80 on, the tokens of each batch are shuffled, as by a wrong join of documents."""
    return ids.flatten()[torch.randperm(ids.numel())].view_as(ids) if step > 80 else ids


def add_random_bytes(ids: Tensor, step: int) -> Tensor:
    """From step 80 on, random bytes in one sequence of four, as from a binary file among the text."""
    if step > 80:
        ids = ids.clone()
        ids[::4] = torch.randint(0, 256, ids[::4].shape)
    return ids


FAILING = [
    Run("rate 0.06", "learning rate", rate=0.06),
    Run("rate 0.1", "learning rate", rate=0.1, seed=1),
    Run("rate 0.06, 4 layers", "learning rate", rate=0.06, seed=2, model=dict(layers=4)),
    Run("rate times 30 at step 80", "learning rate", jump=(80, 30.0), seed=3),
    Run("rate rising by 3 % a step", "learning rate", growth=1.03, seed=14),
    Run("no warm-up, rate 0.05, no gradient clip", "no warm-up", rate=0.05, warmup=0, clip=None, seed=4),
    Run("no warm-up, post-norm, 4 layers, rate 0.01", "no warm-up", rate=0.01, warmup=0, clip=None, seed=5,
        model=dict(layers=4, post_norm=True)),
    Run("no scale, rate 0.03", "no scale", rate=0.03, seed=6, model=dict(scale=1.0)),
    Run("no scale, 4 layers, rate 0.03", "no scale", rate=0.03, seed=7, model=dict(layers=4, scale=1.0)),
    Run("scale √d, rate 0.02", "no scale", rate=0.02, seed=8, model=dict(scale=4.0)),
    Run("bf16 logits, rate 0.06", "bf16 logits", rate=0.06, seed=9, model=dict(bf16=True)),
    Run("bf16 logits, no scale, rate 0.03", "bf16 logits", rate=0.03, seed=10, model=dict(bf16=True, scale=1.0)),
    Run("binary bytes from step 80", "bad data", seed=12, corrupt=add_random_bytes),
    Run("tokens shuffled from step 80", "bad data", seed=13, corrupt=shuffle_tokens),
]  # fmt: skip
SOUND = [
    *(Run(f"seed {seed}", "sound", seed) for seed in (20, 21)),
    Run("rate 0.001", "sound", 22, rate=1e-3),
    Run("rate 0.005", "sound", 23, rate=5e-3),
    Run("4 layers", "sound", 24, model=dict(layers=4)),
    Run("4 layers, post-norm, rate 0.001", "sound", 25, rate=1e-3, model=dict(layers=4, post_norm=True)),
    Run("8 heads", "sound", 26, model=dict(heads=8)),
    Run("1 head", "sound", 27, model=dict(heads=1)),
    Run("QK-norm, rate 0.005", "sound", 28, rate=5e-3, model=dict(qk_norm=True)),
    Run("bf16 logits", "sound", 29, model=dict(bf16=True)),
    Run("SGD, rate 0.3", "sound", 30, rate=0.3, optimizer="sgd"),
    Run("width 128", "sound", 31, rate=1e-3, model=dict(width=128, heads=8)),
]


@dataclass
class Result:
    """The losses of a run and what its monitor said."""

    losses: list[float]
    alarms: list
    samples: int
    seconds: float


def load_text() -> Tensor:
    """Returns the bytes of regard's own source, in a fixed order."""
    files = sorted(Path(regard.__file__).parent.rglob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)[:400_000]))


def train(run: Run, text: Tensor, steps: int, log: Path | None = None) -> Result:
    """Trains one model under a monitor with its default settings."""
    torch.manual_seed(run.seed)
    model, began = Model(**run.model), time.perf_counter()
    kind = torch.optim.AdamW if run.optimizer == "adamw" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=run.rate)
    losses = []
    with regard.Monitor(model, every=100, log=log) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", regard.health.AttentionWarning)
        for step in range(1, steps + 1):
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
            ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            ids = ids if run.corrupt is None else run.corrupt(ids, step)
            factor = min(1.0, step / run.warmup) if run.warmup else 1.0
            if run.jump is not None and step > run.jump[0]:
                factor *= run.jump[1]
            for group in optimizer.param_groups:
                group["lr"] = run.rate * factor * run.growth**step
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            if run.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
    alarms = [alarm for alarm in monitor.alarms if alarm.severity != "note"]
    return Result(losses, alarms, monitor.samples, time.perf_counter() - began)


def means(losses: list[float]) -> list[float]:
    """Returns the mean of the last ten losses at each step."""
    return [sum(losses[max(0, at - WINDOW + 1) : at + 1]) / min(at + 1, WINDOW) for at in range(len(losses))]


def step_of_loss(losses: list[float], twin: list[float]) -> int | None:
    """Returns the step at which the loss shows the failure, None if it never does."""
    lowest = math.inf
    for at, (mean, sound) in enumerate(zip(means(losses), means(twin), strict=False)):
        if mean != mean or mean > lowest + MARGIN or (at >= TWIN_FROM and mean > sound + MARGIN):
            return at + 1
        lowest = min(lowest, mean)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="runs whose name or way contains this word")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--logs", type=Path, help="a folder for the files of the failing runs, for `regard timeline`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = load_text()
    table, sound = [FAILING_HEAD, FAILING_RULE], [SOUND_HEAD, SOUND_RULE]
    early = failed = false = 0
    twins: dict[str, Result] = {}

    def add_sound(run: Run) -> Result:
        nonlocal false
        result = train(run, text, options.steps)
        false += bool(result.alarms)
        sound.append(f"| {run.name} | {means(result.losses)[-1]:.2f} | {result.samples} | {said(result)} |")
        print(sound[-1], f"[{result.seconds:.0f} s]", flush=True)
        return result

    for run in [run for run in FAILING if options.only in run.name or options.only in run.way]:
        name = run.twin().name
        twins[name] = twin = twins.get(name) or add_sound(run.twin())
        log = None if options.logs is None else options.logs / f"{run.name.replace(' ', '-').replace(',', '')}.jsonl"
        result = train(run, text, options.steps, log)
        shown, first = step_of_loss(result.losses, twin.losses), next(iter(result.alarms), None)
        failed += shown is not None
        early += shown is not None and first is not None and first.step < shown
        lead = "" if shown is None or first is None else f"{shown - first.step}"
        final = f"{means(result.losses)[-1]:.2f} ({means(twin.losses)[-1]:.2f})"
        told = f"{first.step} | {lead} | {first.text}" if first else "none | |"
        table.append(f"| {run.way} | {run.name} | {final} | {shown or 'never'} | {told} |")
        print(table[-1], f"[{result.seconds:.0f} s, {result.samples} samples]", flush=True)
    for run in [run for run in SOUND if options.only in run.name or options.only in run.way]:
        add_sound(run)
    count = len(sound) - 2
    summary = f"Spoke before the loss in {early} of {failed} failing runs; warned in {false} of {count} sound runs."
    print(summary)
    if options.markdown is not None:
        options.markdown.write_text("\n".join([summary, "", *table, "", *sound]) + "\n", encoding="utf-8")


def said(result: Result) -> str:
    return "; ".join(f"step {alarm.step}: {alarm.text}" for alarm in result.alarms) or "none"


if __name__ == "__main__":
    main()
