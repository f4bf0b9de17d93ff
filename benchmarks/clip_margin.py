"""By how much logits pass QKClip's threshold between steps, without a margin and with `margin="auto"`.

python -m benchmarks.clip_margin [--steps 200]

Trains the character model of early_warning.py without 1/√d, so that its logits grow, on one thread.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.nn.functional as F

import regard
from benchmarks.early_warning import BATCH, LENGTH, Model, load_text

RUNS = [(3e-3, 0, 10.0), (3e-3, 1, 10.0), (3e-2, 0, 10.0), (3e-2, 1, 10.0), (3e-2, 2, 30.0)]  # rate, seed, threshold
START, LIMIT = 20, 0.02  # the first steps come from far beyond the threshold


def train(rate: float, margin: float | str, threshold: float, seed: int, steps: int) -> tuple[list[float], float]:
    """Returns the largest logit of each step in units of the threshold, and the mean loss of the last 20 steps."""
    torch.manual_seed(seed)
    text, model = load_text(), Model(scale=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    tops, losses = [], []
    with regard.QKClip(model, threshold, margin=margin) as clip:
        for _ in range(steps):
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
            ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tops.append(max(map(max, clip.step().max_logit.values())) / threshold)
            losses.append(loss.item())
    return tops[START:], sum(losses[-20:]) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| rate | threshold | margin | median | largest | steps beyond by 2 % | loss |\n" + "| ---: " * 7 + "|")
    for rate, seed, threshold in RUNS:
        for margin in (0.0, "auto"):
            tops, loss = train(rate, margin, threshold, seed, options.steps)
            beyond = sum(top > 1.0 + LIMIT for top in tops) / len(tops)
            middle = sorted(tops)[len(tops) // 2]
            print(f"| {rate:g} | {threshold:g} | {margin} | {middle - 1:+.0%} | {max(tops) - 1:+.0%} | {beyond:.0%} | "
                  f"{loss:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
