"""How early and how rightly a Monitor reports: failing and sound trainings, in the dense start and after step 700.

python benchmarks/incidents.py [--half seen|unseen|new|reported] [--only WORD] [--seed N] [--markdown FILE]

Each run trains a character model of 2 to 4 layers on regard's own source under `regard.Monitor(model, every=100)` with
its defaults and `monitor.step(loss=…)`. Late runs go on from step 700 of a sound one, its weights, optimizer and
`monitor.state_dict()`. Every second run of each list is "unseen": rules were set on the others. `--seed` makes all runs
anew, the base too, from other weights and batches, which no rule has seen. A sudden fault has its first sign at its own
step, and its effect is the mean loss of the twenty steps after it beside that of its twin, the same training without
it; a slow one is judged by the step at which the loss shows it, as in early_warning.py.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from benchmarks.early_warning import LENGTH, Model, load_text, step_of_loss
from benchmarks.incident_runs import AFTER, BATCH, EARLY, FAILING, LATE, SLOW, SOUND, Run
from benchmarks.reported_runs import REPORTED_FAILING, REPORTED_SOUND

EFFECT = 0.1  # of a fault on the loss, in nats, that is to be reported


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
            if run.each is not None:
                run.each(self.model, self.step)
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
            ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            change = run.corrupt if self.step >= (run.at or 0) else run.easy
            ids = ids if change is None else change(ids)
            warm = min(1.0, self.step / run.warmup) if run.warmup else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = run.rate * warm * run.factor(self.step)
            loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss = loss * run.loss_factor(self.step)
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
    parser.add_argument("--half", choices=["seen", "unseen", "new", "reported"])
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    failing, sound = [*FAILING, *REPORTED_FAILING], [*SOUND, *REPORTED_SOUND]
    for run in (*failing, *sound):
        run.seed += 1000 * options.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    text = load_text()
    base_run = Training(Run("base", seed=1000 * options.seed), None)
    base_run.train(text, 700)
    base, said = base_run.state(), base_run.close()
    print("base:", [str(one) for one in said], f"loss {sum(base['losses'][-20:]) / 20:.2f}", flush=True)

    def chosen(runs: list[Run]) -> list[tuple[str, Run]]:
        return [(run.half, run) for run in runs if options.half in (None, run.half) and options.only in run.name]

    lines = ["| run | half | loss | effect | fault or loss at | incident at | cause | right | incidents |",
             "| --- | --- | --- | ---: | ---: | ---: | --- | --- | ---: |"]  # fmt: skip
    counts = {key: [0, 0] for key in ("sudden", "harmful", "slow", "cause", "few")}
    twins: dict[tuple, list[float]] = {}

    def losses_of_twin(run: Run) -> list[float]:
        """Returns the losses of the same training without its fault."""
        sane = {name: value for name, value in run.model.items() if name not in ("scale", "bf16")}
        key = run.late, run.seed, run.at, str(sane)
        if key not in twins:
            twins[key] = run_one(Run("twin", late=run.late, seed=run.seed, at=run.at, model=sane), text, base)[1]
        return twins[key]

    for half, run in chosen(failing):
        found, losses, seconds = run_one(run, text, base)
        first = found[0] if found else None
        offset = 700 if run.late else 0
        if run.at is not None:
            sign, in_time = run.at, first is not None and first.opened <= run.at + 5
            after = slice(run.at - offset, run.at - offset + 20)
            effect = sum(losses[after]) / 20 - sum(losses_of_twin(run)[after]) / 20
            for key in ("sudden", "harmful")[: 2 - (abs(effect) < EFFECT)]:
                counts[key][0] += in_time
                counts[key][1] += 1
        else:
            effect = math.nan
            shown = step_of_loss(losses, losses_of_twin(run))
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
        by = "" if effect != effect and run.at is None else f"{effect:+.2f}"
        lines.append(f"| {run.name} | {half} | {sparkline(losses)} | {by} | {sign or 'never'} | {told} | {cause} | "
                     f"{'yes' if right else 'no'} | {len(found)} |")  # fmt: skip
        print(lines[-1], f"[{seconds:.0f} s]", "; ".join(one.text for one in found)[:160], flush=True)
    sound_lines, warned = ["| run | half | loss | warnings |", "| --- | --- | --- | --- |"], 0
    for half, run in chosen(sound):
        found, losses, seconds = run_one(run, text, base)
        warned += bool(found)
        sound_lines.append(f"| {run.name} | {half} | {sparkline(losses)} | "
                           f"{'; '.join(f'step {one.opened}: {one.cause}' for one in found) or 'none'} |")  # fmt: skip
        print(sound_lines[-1], f"[{seconds:.0f} s]", "; ".join(one.text for one in found)[:160], flush=True)
    summary = (
        f"Sudden faults reported within 5 steps: {counts['sudden'][0]} of {counts['sudden'][1]}, of those that change "
        f"the loss by {EFFECT}: {counts['harmful'][0]} of {counts['harmful'][1]}. Slow ones before the "
        f"loss: {counts['slow'][0]} of {counts['slow'][1]}. Right cause: {counts['cause'][0]} of {counts['cause'][1]}. "
        f"At most two incidents: {counts['few'][0]} of {counts['few'][1]}. Sound runs with a warning: {warned} of "
        f"{len(sound_lines) - 2}."
    )
    print(summary)
    if options.markdown is not None:
        options.markdown.write_text("\n".join([summary, "", *lines, "", *sound_lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
