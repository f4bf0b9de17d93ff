"""A small language model whose attention is written by hand, with one mistake by name."""

import math

import torch
from torch import nn

WORDS, WIDTH, HEADS = 40, 32, 4


def turn(x, base=10000.0, interleaved=False, step=1.0):
    """Rotary positions on x [B, H, N, D]."""
    half = x.shape[-1] // 2
    angle = step * torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class HandAttention(nn.Module):
    """softmax(q kᵀ/√d + mask)·v, with rotary positions."""

    def __init__(self, bug, causal=True, rotary=True):
        super().__init__()
        self.bug, self.causal, self.rotary = bug, causal, rotary
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if bug.startswith("norm"):
            self.q_norm = nn.RMSNorm(WIDTH // HEADS)
            nn.init.uniform_(self.q_norm.weight)

    def forward(self, x):
        bug, length = self.bug, x.shape[1]
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if bug == "norm first":
            q = self.q_norm(q)
        if self.rotary:
            if bug != "rotary on k only":
                q = turn(q, interleaved=bug == "pairs and halves", step=2.0 if bug == "q twice" else 1.0)
            if bug != "rotary on q only":
                k = turn(k)
            if bug == "rotary on v":
                v = turn(v)
        if bug == "norm after the rotation":
            q = self.q_norm(q)
        d = q.shape[-1]
        s = q @ k.transpose(-1, -2)
        if bug == "divides":  # no mistake
            s = s / math.sqrt(d)
        else:
            s = s * {"no scale": 1.0, "1/d": 1 / d}.get(bug, d**-0.5)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if bug == "upper triangle":
            seen = torch.ones(length, length, dtype=torch.bool).triu()
        if bug == "hides self":
            seen = seen.tril(-1)
            seen[0, 0] = True
        if bug == "mask of zeros":
            s = s * seen
        elif bug == "adds a bool":
            s = s + seen
        elif bug == "small fill":
            s = s.masked_fill(~seen, -4.0)
        elif bug.startswith("masked late"):
            pass
        elif self.causal:
            hidden = {"finite": -1e9, "small mask": -5.0}.get(bug, -math.inf)
            s = s + torch.where(seen, 0.0, hidden)
        p = s.softmax({"softmax over queries": -2, "softmax over heads": 1, "softmax over the batch": 0}.get(bug, -1))
        if bug == "softmax over queries":
            p = p.nan_to_num(0.0)
        if bug.startswith("masked late"):
            p = p * seen
        if bug == "masked late, divided":
            p = p / p.sum(-1, keepdim=True)
        if bug == "weights times 2":
            p = p * 2
        o = p @ (k if bug == "keys for values" else v)
        if bug == "merged by view":
            return self.o(o.reshape(x.shape))
        return self.o(o.transpose(1, 2).flatten(2))


class HandModel(nn.Module):
    """Logits of token ids."""

    def __init__(self, bug="", layers=2, causal=True, rotary=True, table=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.table = nn.Embedding(64, WIDTH) if table else None
        self.layers = nn.ModuleList(HandAttention(bug, causal, rotary) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        if self.table is not None:
            x = x + self.table(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class AlibiModel(nn.Module):
    """Causal attention with the bias −slope·distance, with one mistake by name."""

    def __init__(self, bug="", heads=8):
        super().__init__()
        torch.manual_seed(0)
        self.bug, self.heads, self.embedding = bug, heads, nn.Embedding(WORDS, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids):
        q, k, v = self.qkv(self.embedding(input_ids)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        slopes = 2.0 ** (-8 / self.heads * torch.arange(1, self.heads + 1))
        slopes = slopes.flip(0) if self.bug == "order" else slopes / 2 if self.bug == "half" else slopes
        at = torch.arange(input_ids.shape[1])
        distance = at[:, None] - at
        bias = -slopes[:, None, None] * (distance.clamp(0, 1) if self.bug == "same" else distance)
        bias = (-bias if self.bug == "sign" else bias).masked_fill(at[:, None] < at, -math.inf)
        o = nn.functional.scaled_dot_product_attention(q, k, v, bias.expand(len(input_ids), -1, -1, -1))
        return self.head(o.transpose(1, 2).flatten(2))


def random_ids(batch=3, length=24, seed=0):
    return torch.randint(3, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))
