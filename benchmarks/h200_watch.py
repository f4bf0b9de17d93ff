"""What Monitor and QKClip cost a compiled training step of GPT-2 small on a GPU, and that they see every step.

As a training runs: the host does not wait for the GPU after each step, and a time is that of CHUNK steps.

python -m benchmarks.h200_watch [--mode default|reduce-overhead] [--steps 60] [--out benchmarks/results]

Aims: 1.02 × for `Monitor(every=1, metrics=("max_logit",))`, 1.03 × for QKClip. The three are trained in turns, `ROUNDS`
times each; the table has the median step. Writes h200-watch.md. `--tiny` tries all of it on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import regard
from benchmarks.revision import find_revision

ROUNDS = 3
CHUNK = 10  # steps between two waits
TINY = dict(layers=2, width=64, heads=4, vocab=500, length=64)


class Block(nn.Module):
    """GPT-2's block, written with torch's own functions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, layers=12, width=768, heads=12, vocab=50257, length=1024) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1)[:-1].float(), ids.flatten()[1:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(mode: str, watch: str, steps: int, is_tiny: bool) -> tuple[list[float], str]:
    """Returns the seconds of the last two thirds of the steps, and what the watcher saw."""
    device, sizes = ("cpu", TINY) if is_tiny else ("cuda", {})
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(**sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows: list[dict] = []
    clip = regard.QKClip(model, threshold=3.0) if watch == "QKClip" else None
    monitor = None
    if watch == "Monitor":
        monitor = regard.Monitor(model, every=1, metrics=("max_logit",), log=rows.append, budget=1.0)
    compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
    ids = torch.randint(500, (2, 64)) if is_tiny else torch.randint(50257, (16, 1024), device=device)
    times = []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clip is not None:
            clip.step()
        if monitor is not None:
            monitor.step(loss=loss)
        if step % CHUNK == 0:
            wait(device)
            times.append((time.perf_counter() - began) / CHUNK)
            began = time.perf_counter()
    seen = ""
    if clip is not None:
        tops = [max(heads) for heads in clip.last.max_logit.values()]
        seen = f"{len(tops)} layers, largest logit {max(tops):.3g}, {len(clip.last.heads)} heads clipped"
        clip.close()
    if monitor is not None:
        monitor.close()
        found = [row["attention/max_logit"] for row in rows if "attention/max_logit" in row]
        seen = f"{len(found)} samples, {len(monitor.layers)} layers, last largest logit {found[-1]:.3g}"
    return times[1:], seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", action="append", choices=["default", "reduce-overhead"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    where = "a CPU" if options.tiny else torch.cuda.get_device_name()
    what = "a tiny model" if options.tiny else "GPT-2 small, B16 × 1024"
    lines = [f"Compiled {what}, bfloat16, on {where}, torch {torch.__version__}, {find_revision()}.", "",
             "| mode | watched by | ms a step | × alone | seen |", "| --- | --- | ---: | ---: | --- |"]  # fmt: skip
    for mode in options.mode or ["default", "reduce-overhead"]:
        times: dict[str, list[float]] = {"nothing": [], "QKClip": [], "Monitor": []}
        seen = dict.fromkeys(times, "")
        for _ in range(ROUNDS):
            for watch, known in times.items():
                more, seen[watch] = train(mode, watch, options.steps, options.tiny)
                known += more
        medians = {watch: statistics.median(known) for watch, known in times.items()}
        lines += [f"| {mode} | {watch} | {1e3 * x:.2f} | {x / medians['nothing']:.3f} | {seen[watch]} |"
                  for watch, x in medians.items()]  # fmt: skip
        print("\n".join(lines[-3:]), flush=True)
    if options.out is not None:
        (options.out / "h200-watch.md").write_text(
            "# What watching costs compiled training\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
