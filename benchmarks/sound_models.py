"""What sound layers look like when they are trained long: character models with 1/√d, examined on the way.

PYTHONPATH=. python3 benchmarks/sound_models.py --data FILE.txt [--seconds 75] [--device cuda] [--only 0]

Each line: model, steps, loss on text it never saw, findings, and per layer the medians over heads of logit variance,
of the variance that the norms predict, and of the gradient gain. The thresholds of `scale off` are read off these.
The last model leaves 1/√d out, for comparison.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from regard import examine
from regard.health.tiny import TinyLM, batches, encode

MODELS = (
    dict(layers=4, heads=4, width=128, rate=2e-3, decay=0.01),
    dict(layers=4, heads=4, width=256, rate=1e-3, decay=0.1),
    dict(layers=6, heads=8, width=256, rate=6e-4, decay=0.0),
    dict(layers=2, heads=4, width=128, rate=3e-3, decay=0.0),
    dict(layers=4, heads=4, width=256, rate=1e-3, decay=0.1, scale="none"),
)
LENGTH, BATCH = 128, 48
MARKS = {300, 1000, 2000, 4000, 8000, 16000}


def look(model: TinyLM, held: list[torch.Tensor], name: str, step: int) -> None:
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).item() for x in held]
    report = examine(model, held)
    layers: dict[int, list] = {}
    for head in report.heads:
        layers.setdefault(head.index, []).append(head)
    told = ", ".join(f"{one.kind} {len(one.heads)}" for one in report.findings) or "none"
    numbers = " ".join(
        f"{median(head.statistics.mean('logit_variance') for head in heads):.1f}/"
        f"{median(head.predicted_variance for head in heads):.1f}/"
        f"{median(head.statistics.mean('gradient_gain') for head in heads):.2f}"
        for heads in layers.values()
    )
    print(f"| {name} | {step} | {sum(losses) / len(losses):.3f} | {told} | {numbers} |", flush=True)
    model.train()


def train(options: dict, text: str, device: str, seconds: float) -> None:
    cut = len(text) * 9 // 10
    known = encode(text[:cut]).to(device)
    held = [batch.to(device) for batch in batches(text[cut:], LENGTH, 32)[:6]]
    rate, decay = options.pop("rate"), options.pop("decay")
    torch.manual_seed(0)
    model = TinyLM(length=LENGTH, **options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    sizes = f"{options['layers']} × {options['heads']} heads, width {options['width']}, rate {rate:g}, decay {decay:g}"
    name = sizes + (", no 1/√d" if options.get("scale") == "none" else "")
    draw, step, until = torch.Generator().manual_seed(0), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        at = torch.randint(0, len(known) - LENGTH - 1, (BATCH, 1), generator=draw) + torch.arange(LENGTH + 1)
        ids = known[at.to(device)]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step in MARKS:
            look(model, held, name, step)
    look(model, held, name, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=75.0, help="of training, per model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=int, help="one of the models, from 0 on")
    given = parser.parse_args()
    text = given.data.read_text(encoding="utf-8")
    for number, options in enumerate(MODELS):
        if given.only in (None, number):
            train(dict(options), text, given.device, given.seconds)


if __name__ == "__main__":
    main()
