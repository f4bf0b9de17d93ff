"""Clips the logits of a Llama-style model after each optimizer step, in a training loop as torchtitan writes it.

python examples/torchtitan_loop.py --threshold 8

`regard.qk_clip` shrinks wq and wk of heads whose largest logit passed the threshold; the first call starts to observe.
"""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import regard


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, rope):
        xq, xk, xv = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_emb(xq, rope), apply_rotary_emb(xk, rope)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(output.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention = Attention(dim, n_heads)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x, rope):
        h = x + self.attention(self.attention_norm(x), rope)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, dim, n_layers, n_heads, vocab_size=256):
        super().__init__()
        self.head_dim = dim // n_heads
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_heads) for _ in range(n_layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        frequencies = 10000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        rope = torch.polar(torch.ones(()), torch.outer(torch.arange(tokens.shape[1]), frequencies))
        for layer in self.layers:
            h = layer(h, rope)
        return self.output(self.norm(h))


def apply_rotary_emb(x, rope):  # [B, H, T, D] with [T, D/2]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rope).flatten(-2)


def main(args):
    torch.manual_seed(0)
    windows = torch.tensor(list(args.data.read_bytes())).unfold(0, args.seq_len + 1, 1)
    model = Transformer(args.dim, args.n_layers, args.n_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, args.steps + 1):
        batch = windows[torch.randint(len(windows), (8,))]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clipped = regard.qk_clip(model, threshold=args.threshold, names=("wq", "wk"))
        if step == 1 or step % args.log_freq == 0:
            metrics = {"loss": loss.item(), "grad_norm": grad_norm.item(), "clipped_heads": len(clipped.heads)}
            metrics |= {f"max_logit/{name}": max(heads) for name, heads in clipped.max_logit.items()}
            print(f"step: {step:3}  " + "  ".join(f"{name}: {value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__), help="text; default: this file")
    for name, default in dict(dim=64, n_layers=2, n_heads=4, seq_len=64, steps=60, log_freq=10).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threshold", type=float, default=8.0, help="largest logit a head may have; 100 in Kimi K2")
    main(parser.parse_args())
