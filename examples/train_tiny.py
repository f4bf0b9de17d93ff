"""Train the two language models of `regard demo`: the same but for 1/√d_k. About five minutes each on two cores.

python examples/train_tiny.py --data FILE.txt --out regard/checkpoints
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from regard.health.tiny import TinyLM, encode, save


def loss_on(model: TinyLM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def windows(ids: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(ids) - length - 1, (count,), generator=generator)
    return torch.stack([ids[start : start + length + 1] for start in starts])


def train(scale: str, ids: torch.Tensor, steps: int, batch: int, seed: int) -> tuple[TinyLM, float]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = TinyLM(scale=scale)
    length = model.options["length"]
    known, unseen = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        loss = loss_on(model, windows(known, batch, length, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"scale {scale} step {step} loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        validation = loss_on(model.eval(), windows(unseen, 64, length, torch.Generator().manual_seed(0))).item()
    return model, validation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="plain text to train on")
    parser.add_argument("--out", type=Path, default=Path("regard/checkpoints"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ids = encode(options.data.read_text(encoding="utf-8"))
    for name, scale in (("tiny-scaled", "sqrt"), ("tiny-unscaled", "none")):
        model, validation = train(scale, ids, options.steps, options.batch, options.seed)
        save(model, options.out / f"{name}.safetensors", validation_loss=f"{validation:.3f}", steps=str(options.steps))
        print(f"{name}: validation loss {validation:.3f}", flush=True)


if __name__ == "__main__":
    main()
