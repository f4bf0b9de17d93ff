"""Trains a GPT as nanoGPT does, with another normaliser in its attention and a monitor of every head.

python examples/nanogpt.py --normalizer entmax15

The model is written as usual and calls torch's scaled_dot_product_attention. `regard.using` swaps the normaliser of
those calls, and `regard.Monitor` measures them in one step of `--log_interval`.
"""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import regard


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*[Block(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        return F.cross_entropy(self.lm_head(self.ln_f(self.h(x))).flatten(0, 1), targets.flatten())


def main(args):
    torch.manual_seed(1337)
    data = torch.tensor(list(args.data.read_bytes())).unfold(0, args.block_size + 1, 1)

    def get_batch(size):
        batch = data[torch.randint(len(data), (size,))]
        return batch[:, :-1], batch[:, 1:]

    model = GPT(256, args.block_size, args.n_layer, args.n_head, args.n_embd)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    rows = []  # or log=a TensorBoard writer, a wandb run, a path
    monitor = regard.Monitor(model, every=args.log_interval, log=rows.append, heads=True, budget=1.0)
    with monitor, regard.using(model, normalizer=args.normalizer):
        for iter_num in range(args.max_iters):
            loss = model(*get_batch(args.batch_size))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if iter_num % args.log_interval == 0:
                entropy = [row["entropy_ratio"] for row in rows if "head" in row and row["step"] == iter_num + 1]
                print(f"iter {iter_num}: loss {loss:.3f}, min entropy ratio of {len(entropy)} heads {min(entropy):.2f}")
        batch = get_batch(64)
        swapped = model(*batch).item()
    print(f"loss {swapped:.3f} with {args.normalizer}, {model(*batch).item():.3f} with the model's own softmax")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__), help="text to train on; default: this file")
    parser.add_argument("--normalizer", default="entmax15")
    sizes = dict(n_layer=2, n_head=4, n_embd=64, block_size=64, batch_size=8, max_iters=101, log_interval=25)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(parser.parse_args())
