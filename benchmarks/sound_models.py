"""What layers look like that were trained with 1/√d, and without: character models of many shapes, examined on the way.

PYTHONPATH=. python3 benchmarks/sound_models.py --data FILE.txt [--seconds 40] [--device cuda] [--only d8 d64]

Each line: model, steps, length of the text examined, heads called `scale off`, other findings, and per layer the
medians over heads of logit variance, of the variance that the norms predict, and of the gain over a uniform row's.
The thresholds of `scale off` are read off these. Models whose names begin with "no" leave 1/√d out, those with "× 6"
multiply their queries so.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import examine
from regard.health.models.tiny import CHARACTERS, batches, encode

MODELS = {
    "d8": dict(heads=16, head_dim=8, rate=2e-3),
    "d8, learned positions": dict(heads=16, head_dim=8, rate=3e-3, rotary=False),
    "d16": dict(heads=8, head_dim=16, rate=3e-3),
    "d32, biases": dict(heads=4, head_dim=32, bias=True, rate=3e-3),
    "d64": dict(heads=4, head_dim=64, rate=2e-3),
    "d64, weights 0.02": dict(heads=4, head_dim=64, std=0.02, rate=2e-3, rotary=False),
    "d64, 8/d": dict(heads=4, head_dim=64, scale=8.0 / 64, rate=2e-3),
    "d64, 1/d": dict(heads=4, head_dim=64, scale=1.0 / 64, rate=3e-3),
    "d256": dict(layers=3, heads=2, head_dim=256, rate=1e-3),
    "d32, grouped": dict(heads=8, head_dim=32, kv_heads=2, rate=2e-3),
    "d32, QK-norm": dict(heads=4, head_dim=32, qk_norm=True, rate=4e-3),
    "d8, QK-norm": dict(heads=16, head_dim=8, qk_norm=True, rate=4e-3),
    "no, d8": dict(heads=16, head_dim=8, scale=1.0, rate=2e-3),
    "no, d16": dict(heads=8, head_dim=16, scale=1.0, rate=1e-3),
    "no, d64": dict(heads=4, head_dim=64, scale=1.0, rate=1e-3),
    "no, d32, grouped": dict(heads=8, head_dim=32, kv_heads=2, scale=1.0, rate=1e-3),
    "no, d32, QK-norm": dict(heads=4, head_dim=32, qk_norm=True, scale=1.0, rate=1e-3),
    "no, d64, weights 0.02": dict(heads=4, head_dim=64, std=0.02, scale=1.0, rate=1e-3, rotary=False),
    "× 6, d8": dict(heads=16, head_dim=8, times=6.0, rate=2e-3),
    "× 6, d16": dict(heads=8, head_dim=16, times=6.0, rate=2e-3),
    "× 6, d32": dict(heads=4, head_dim=32, times=6.0, rate=2e-3, rotary=False),
    "× 6, d64": dict(heads=4, head_dim=64, times=6.0, rate=2e-3),
}
LENGTH, BATCH = 128, 48
LOOKS = (16, 64, 128, 512)  # characters
MARKS = {0, 300, 1000, 3000, 10000}


def rotated(x: Tensor) -> Tensor:
    """x [B, H, N, D] by rotary positions."""
    half = torch.arange(0, x.shape[-1], 2, device=x.device)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 10000.0 ** (-half / x.shape[-1])
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(
        self, heads, head_dim, kv_heads=None, scale=None, qk_norm=False, rotary=True, std=None, bias=False, times=1.0
    ):
        super().__init__()
        width, self.head_dim, self.scale, self.rotary = heads * head_dim, head_dim, scale, rotary
        self.times = times
        shared = kv_heads or heads
        self.grouped = shared != heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, shared * head_dim, bias=bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.q, self.k):
            nn.init.normal_(layer.weight, std=std or width**-0.5)
        self.norms = nn.ModuleList(nn.RMSNorm(head_dim) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.times * self.norms[0](q), self.norms[1](k)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped)
        return self.out(o.transpose(1, 2).flatten(2))


class Characters(nn.Module):
    def __init__(self, heads, head_dim, layers=4, rotary=True, **options):
        super().__init__()
        width, self.rotary = heads * head_dim, rotary
        self.token, self.position = nn.Embedding(len(CHARACTERS), width), nn.Embedding(1024, width)
        self.attentions, self.mlps, self.norms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            self.attentions.append(Attention(heads, head_dim, rotary=rotary, **options))
            self.mlps.append(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)))
            self.norms.append(nn.ModuleList(nn.LayerNorm(width) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS), bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        if not self.rotary:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for attention, mlp, (before, between) in zip(self.attentions, self.mlps, self.norms, strict=True):
            x = x + attention(before(x))
            x = x + mlp(between(x))
        return self.head(self.norm(x))


def look(model: Characters, text: str, name: str, step: int, device: str) -> None:
    model.eval()
    for length in LOOKS:
        report = examine(model, [batch.to(device) for batch in batches(text, length, 4096 // length)[:2]])
        layers: dict[int, list] = {}
        for head in report.heads:
            layers.setdefault(head.index, []).append(head)
        off = sum(len(one.heads) for one in report.findings if one.kind == "scale off")
        others = ", ".join(f"{one.kind} {len(one.heads)}" for one in report.findings if one.kind != "scale off")
        numbers = " ".join(
            f"{median(head.statistics.mean('logit_variance') for head in heads):.1f}/"
            f"{median(head.predicted_variance for head in heads):.1f}/"
            f"{median(head.statistics.mean('gain_ratio') for head in heads):.2f}"
            for heads in layers.values()
        )
        print(f"| {name} | {step} | {length} | {off} of {len(report.heads)} | {others} | {numbers} |", flush=True)
    model.train()


def train(name: str, text: str, device: str, seconds: float) -> None:
    cut, options = len(text) * 9 // 10, dict(MODELS[name])
    known, rate = encode(text[:cut]).to(device), options.pop("rate")
    torch.manual_seed(0)
    model = Characters(**options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    look(model, text[cut:], name, 0, device)
    step, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        at = torch.randint(0, len(known) - LENGTH - 1, (BATCH, 1), device=device)
        ids = known[at + torch.arange(LENGTH + 1, device=device)]
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
            look(model, text[cut:], name, step, device)
    print(f"| {name}: loss {loss.item():.3f} |")
    look(model, text[cut:], name, step, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0, help="of training, per model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    given = parser.parse_args()
    text = given.data.read_text(encoding="utf-8")
    for name in given.only:
        train(name, text, given.device, given.seconds)


if __name__ == "__main__":
    main()
