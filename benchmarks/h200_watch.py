"""What Monitor and QKClip cost a compiled training step of GPT-2 small on a GPU, and that they see every step.

python -m benchmarks.h200_watch [--mode default|reduce-overhead] [--steps 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import regard


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


def train(mode: str, watch: str, steps: int) -> tuple[float, str]:
    """Returns the median seconds of a step, and what the watcher saw."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows: list[dict] = []
    clip = regard.QKClip(model, threshold=3.0) if watch == "QKClip" else None
    monitor = None
    if watch == "Monitor":
        monitor = regard.Monitor(model, every=1, metrics=("max_logit",), log=rows.append, budget=1.0)
    compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
    ids = torch.randint(50257, (8, 1024), device="cuda")
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clip is not None:
            clip.step()
        if monitor is not None:
            monitor.step(loss=loss)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seen = ""
    if clip is not None:
        tops = [max(heads) for heads in clip.last.max_logit.values()]
        seen = f"{len(tops)} layers, largest logit {max(tops):.3g}, {len(clip.last.heads)} heads clipped"
        clip.close()
    if monitor is not None:
        monitor.close()
        found = [row["attention/max_logit"] for row in rows if "attention/max_logit" in row]
        seen = f"{len(found)} samples, {len(monitor.layers)} layers, last largest logit {found[-1]:.3g}"
    return statistics.median(times[steps // 3 :]), seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", action="append", choices=["default", "reduce-overhead"])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(torch.cuda.get_device_name(), torch.__version__)
    for mode in options.mode or ["default", "reduce-overhead"]:
        alone = None
        for watch in ("nothing", "QKClip", "Monitor"):
            seconds, seen = train(mode, watch, options.steps)
            alone = alone or seconds
            print(f"{mode}, {watch}: {1e3 * seconds:.2f} ms, {seconds / alone:.3f} × alone; {seen}", flush=True)


if __name__ == "__main__":
    main()
