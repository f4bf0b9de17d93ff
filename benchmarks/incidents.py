"""How early and how rightly a Monitor reports: failing and sound trainings, in the dense start and after step 700.

python benchmarks/incidents.py [--half seen|unseen] [--only WORD] [--seed N] [--markdown FILE]

Each run trains a character model of 2 to 4 layers on regard's own source under `regard.Monitor(model, every=100)` with
its defaults and `monitor.step(loss=…)`. Late runs go on from step 700 of a sound one, its weights, optimizer and
`monitor.state_dict()`. Every second run of each list is "unseen": rules were set on the others. `--seed` makes all runs
anew, the base too, from other weights and batches, which no rule has seen. A sudden fault has
its first sign at its own step; a slow one is judged by the step at which the loss shows it, as in early_warning.py.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from benchmarks.early_warning import LENGTH, Model, load_text, step_of_loss
from regard.health.watching.incidents import DATA, DEAD, LARGE, MOVED, NOT_FINITE

BATCH, EARLY, LATE, AFTER = 4, 160, 720, 50  # sequences; the steps of early and late faults; steps after them
SLOW = 180  # steps of a slow early run
WEIGHTS = (LARGE, MOVED)
INPUT = (DATA, MOVED)


@dataclass
class Run:
    """One training: what happens to it, which causes name that, and its settings."""

    name: str
    causes: tuple[str, ...] = ()  # none: sound
    at: int | None = None  # the step of a sudden fault
    break_: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None  # done once, before step `at`
    corrupt: Callable[[Tensor], Tensor] | None = None  # of the batches from `at` on
    rate: float = 2e-3
    factor: Callable[[int], float] = lambda step: 1.0  # of the rate
    warmup: int = 20
    clip: float | None = 1.0
    seed: int = 0
    sgd: bool = False
    late: bool = False
    model: dict = field(default_factory=dict)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [block.attention for block in model.blocks]


def scale_queries(by: float):
    def act(model, optimizer):
        with torch.no_grad():
            for one in attentions(model):
                one.qkv.weight[: one.qkv.weight.shape[1] * 2] *= by

    return act


def put(value: float, where: str):
    def act(model, optimizer):
        with torch.no_grad():
            weight = model.blocks[0].mlp[0].weight if where == "mlp" else attentions(model)[-1].qkv.weight
            weight[0, 0] = value

    return act


def drop_values(model, optimizer):
    with torch.no_grad():
        for one in attentions(model):
            one.qkv.weight[-one.qkv.weight.shape[1] :] = 0.0


def lose_scale(model, optimizer):
    for one in attentions(model):
        one.scale = 2.0


def wipe_embedding(model, optimizer):
    with torch.no_grad():
        model.token.weight.normal_()


def shuffle(ids: Tensor) -> Tensor:
    return ids.flatten()[torch.randperm(ids.numel())].view_as(ids)


def bytes_in_half(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[::2] = torch.randint(0, 256, ids[::2].shape)
    return ids


def reverse(ids: Tensor) -> Tensor:
    return ids.flip(1)


def wrong_labels(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 1::2] = torch.randint(32, 127, ids[:, 1::2].shape)
    return ids


def jump(by: float, at: int):
    return lambda step: by if step >= at else 1.0


def sudden(late: bool) -> list[Run]:
    at, word = (LATE, "late") if late else (EARLY, "early")
    more: dict[str, Any] = dict(at=at, late=late)
    return [
        Run(f"{word}: rate times 30", WEIGHTS, factor=jump(30.0, at), clip=None, **more),
        Run(f"{word}: rate times 100", WEIGHTS, factor=jump(100.0, at), **more),
        Run(f"{word}: tokens shuffled", INPUT, corrupt=shuffle, **more),
        Run(f"{word}: random bytes in half of the batch", INPUT, corrupt=bytes_in_half, **more),
        Run(f"{word}: NaN in a weight", (NOT_FINITE,), break_=put(math.nan, "mlp"), **more),
        Run(f"{word}: infinity in q", (NOT_FINITE,), break_=put(math.inf, "attention"), **more),
        Run(f"{word}: weights of q and k times 30", (LARGE,), break_=scale_queries(30.0), **more),
        Run(f"{word}: weights of q and k times 10", (LARGE, MOVED), break_=scale_queries(10.0), **more),
        Run(f"{word}: every second token random", INPUT, corrupt=wrong_labels, **more),
        Run(f"{word}: text read backwards", INPUT, corrupt=reverse, **more),
        Run(f"{word}: values lost", (DEAD, *INPUT), break_=drop_values, **more),
        Run(f"{word}: embedding lost", INPUT, break_=wipe_embedding, **more),
    ]


def grow(by: float, since: int = 0):
    return lambda step: by ** max(0, step - since)


SLOW_RUNS = [
    Run("slow: rate 0.06", WEIGHTS, rate=0.06, seed=1),
    Run("slow: rate 0.1", WEIGHTS, rate=0.1, seed=2),
    Run("slow: rate growing by 4 % a step", WEIGHTS, factor=grow(1.04), seed=3),
    Run("slow: rate 0.05, no warm-up, no clip", WEIGHTS, rate=0.05, warmup=0, clip=None, seed=4),
    Run("slow: no scale, rate 0.03", WEIGHTS, rate=0.03, seed=5, model=dict(scale=1.0)),
    Run("slow: no scale, 4 layers, rate 0.03", WEIGHTS, rate=0.03, seed=6, model=dict(layers=4, scale=1.0)),
    Run("slow: scale √d, rate 0.03", WEIGHTS, rate=0.03, seed=7, model=dict(scale=4.0)),
    Run("slow: bf16 logits, rate 0.06", WEIGHTS, rate=0.06, seed=8, model=dict(bf16=True)),
    Run("late: rate growing by 5 % a step", WEIGHTS, factor=grow(1.05, LATE), late=True),
    Run("late: rate growing by 8 % a step", WEIGHTS, factor=grow(1.08, LATE), late=True),
]  # fmt: skip
FAILING = [*sudden(False), *sudden(True), *SLOW_RUNS]
SOUND = [
    *(Run(f"seed {seed}", seed=seed) for seed in range(10, 16)),
    Run("rate 5e-4", rate=5e-4, seed=16), Run("rate 1e-3", rate=1e-3, seed=17), Run("rate 4e-3", rate=4e-3, seed=18),
    Run("rate 6e-3", rate=6e-3, seed=19), Run("rate 8e-3", rate=8e-3, seed=20), Run("no warm-up", warmup=0, seed=21),
    Run("no gradient clip", clip=None, seed=22), Run("4 layers", seed=23, model=dict(layers=4)),
    Run("4 layers, rate 4e-3", rate=4e-3, seed=24, model=dict(layers=4)),
    Run("post-norm, rate 1e-3", rate=1e-3, seed=25, model=dict(post_norm=True)),
    Run("1 head", seed=26, model=dict(heads=1)), Run("8 heads", seed=27, model=dict(heads=8)),
    Run("width 128, 8 heads", rate=1e-3, seed=28, model=dict(width=128, heads=8)),
    Run("width 128, 8 heads, rate 3e-3", rate=3e-3, seed=29, model=dict(width=128, heads=8)),
    Run("QK-norm", seed=30, model=dict(qk_norm=True)),
    Run("QK-norm, 6e-3", rate=6e-3, seed=31, model=dict(qk_norm=True)),
    Run("bf16 logits", seed=32, model=dict(bf16=True)), Run("SGD", rate=0.3, sgd=True, seed=33),
    Run("late: goes on", late=True), Run("late: goes on, other batches", late=True, seed=41),
    Run("late: rate falls to 0", late=True, seed=42, factor=lambda step: max(0.0, 1 - (step - 700) / 80)),
    Run("late: rate warms up again", late=True, seed=43, factor=lambda step: min(1.0, (step - 700) / 40)),
    Run("late: rate doubled", late=True, seed=44, factor=jump(2.0, LATE)),
    Run("late: no clip", late=True, clip=None, seed=45),
    Run("late: rate times 3", late=True, seed=46, factor=jump(3.0, LATE)),
    Run("late: other batches", late=True, seed=47),
]  # fmt: skip


class Training:
    """A model, its optimizer and its monitor, which can be copied at a step."""

    def __init__(self, run: Run, base: dict | None) -> None:
        torch.manual_seed(run.seed)
        self.run, self.model = run, Model(**run.model)
        kind = torch.optim.SGD if run.sgd else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=run.rate)
        self.losses: list[float] = []
        self.monitor = regard.Monitor(self.model, every=100)
        self.step = 0
        if base is not None:
            self.model.load_state_dict(base["model"])
            self.optimizer.load_state_dict(copy.deepcopy(base["optimizer"]))
            self.monitor.load_state_dict(copy.deepcopy(base["monitor"]))
            self.step, self.losses = base["step"], list(base["losses"])

    def state(self) -> dict:
        return dict(
            model=copy.deepcopy(self.model.state_dict()), optimizer=copy.deepcopy(self.optimizer.state_dict()),
            monitor=self.monitor.state_dict(), step=self.step, losses=list(self.losses),
        )  # fmt: skip

    def train(self, text: Tensor, until: int) -> None:
        run = self.run
        while self.step < until:
            self.step += 1
            if run.break_ is not None and self.step == run.at:
                run.break_(self.model, self.optimizer)
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
            ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            if run.corrupt is not None and self.step >= (run.at or 0):
                ids = run.corrupt(ids)
            warm = min(1.0, self.step / run.warmup) if run.warmup else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = run.rate * warm * run.factor(self.step)
            loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            if run.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), run.clip)
            self.optimizer.step()
            self.losses.append(loss.item())
            self.monitor.step(loss=loss)

    def close(self) -> list:
        """Returns the incidents graver than a note."""
        self.monitor.close()
        return [one for one in self.monitor.incidents if one.severity != "note"]


def sparkline(losses: list[float]) -> str:
    """Returns a loss curve in 24 characters, × where it is not finite."""
    size = max(1, math.ceil(len(losses) / 24))
    means = [sum(losses[at : at + size]) / len(losses[at : at + size]) for at in range(0, len(losses), size)]
    finite = [x for x in means if math.isfinite(x)]
    low, high = min(finite), max(finite)
    marks = "▁▂▃▄▅▆▇█"
    return "".join("×" if not math.isfinite(x) else marks[int((x - low) / max(high - low, 1e-9) * 7)] for x in means)


def run_one(run: Run, text: Tensor, base: dict) -> tuple[list, list[float], float]:
    began = time.perf_counter()
    training = Training(run, base if run.late else None)
    first = training.step
    end = (LATE if run.late else EARLY if run.at is not None else SLOW) + (
        AFTER if run.late or run.at is not None else 0
    )
    training.train(text, end)
    found = [one for one in training.close() if one.opened > first]
    return found, training.losses[first:], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=["seen", "unseen"])
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    for run in (*FAILING, *SOUND):
        run.seed += 1000 * options.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    text = load_text()
    base_run = Training(Run("base", seed=1000 * options.seed), None)
    base_run.train(text, 700)
    base, said = base_run.state(), base_run.close()
    print("base:", [str(one) for one in said], f"loss {sum(base['losses'][-20:]) / 20:.2f}", flush=True)

    def chosen(runs: list[Run]) -> list[tuple[str, Run]]:
        halves = [(("seen", "unseen")[at % 2], run) for at, run in enumerate(runs)]
        return [(h, run) for h, run in halves if options.half in (None, h) and options.only in run.name]

    lines = ["| run | half | loss | fault or loss at | incident at | cause | right | incidents |",
             "| --- | --- | --- | ---: | ---: | --- | --- | ---: |"]  # fmt: skip
    counts = {key: [0, 0] for key in ("sudden", "slow", "cause", "few")}
    for half, run in chosen(FAILING):
        found, losses, seconds = run_one(run, text, base)
        first = found[0] if found else None
        offset = 700 if run.late else 0
        if run.at is not None:
            sign, in_time = run.at, first is not None and first.opened <= run.at + 5
            counts["sudden"][0] += in_time
            counts["sudden"][1] += 1
        else:
            sound = Run("twin", late=run.late, seed=run.seed, model={k: v for k, v in run.model.items()
                                                                     if k not in ("scale", "bf16")})  # fmt: skip
            shown = step_of_loss(losses, run_one(sound, text, base)[1])
            sign = None if shown is None else shown + offset
            if sign is not None:
                counts["slow"][0] += first is not None and first.opened < sign
                counts["slow"][1] += 1
        right = any(one.cause in run.causes for one in found[:1])
        counts["cause"][0] += right
        counts["cause"][1] += 1
        counts["few"][0] += len(found) <= 2
        counts["few"][1] += 1
        told = "none" if first is None else str(first.opened)
        cause = "" if first is None else first.cause
        lines.append(f"| {run.name} | {half} | {sparkline(losses)} | {sign or 'never'} | {told} | {cause} | "
                     f"{'yes' if right else 'no'} | {len(found)} |")  # fmt: skip
        print(lines[-1], f"[{seconds:.0f} s]", "; ".join(one.text for one in found)[:160], flush=True)
    sound_lines, warned = ["| run | half | loss | warnings |", "| --- | --- | --- | --- |"], 0
    for half, run in chosen(SOUND):
        found, losses, seconds = run_one(run, text, base)
        warned += bool(found)
        sound_lines.append(f"| {run.name} | {half} | {sparkline(losses)} | "
                           f"{'; '.join(f'step {one.opened}: {one.cause}' for one in found) or 'none'} |")  # fmt: skip
        print(sound_lines[-1], f"[{seconds:.0f} s]", "; ".join(one.text for one in found)[:160], flush=True)
    summary = (
        f"Sudden faults reported within 5 steps: {counts['sudden'][0]} of {counts['sudden'][1]}. Slow ones before the "
        f"loss: {counts['slow'][0]} of {counts['slow'][1]}. Right cause: {counts['cause'][0]} of {counts['cause'][1]}. "
        f"At most two incidents: {counts['few'][0]} of {counts['few'][1]}. Sound runs with a warning: {warned} of "
        f"{len(sound_lines) - 2}."
    )
    print(summary)
    if options.markdown is not None:
        options.markdown.write_text("\n".join([summary, "", *lines, "", *sound_lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
