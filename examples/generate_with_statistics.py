"""Generates text token by token with a KV cache, and prints what the attention of each step looked at.

python examples/generate_with_statistics.py --prompt "To be, or not" --tokens 24

Every call of `regard.attention` returns the statistics of the new token's row from the same pass. The model is the
character model that ships with regard. It needs `regard[cpu]`.
"""

import argparse

import torch

import regard
from regard.health.models.tiny import CHARACTERS, checkpoint, encode

NAMES = ("effective_keys", "max_weight", "first_key_mass", "distance")


def attend(layer, x, cache):
    """Returns the layer's output for new positions x [B, T, C] and their statistics [B, H, T]; extends the cache."""
    B, T, C = x.shape
    q, k, v = layer.qkv(x).reshape(B, T, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
    if cache:
        k, v = torch.cat([cache["k"], k], dim=2), torch.cat([cache["v"], v], dim=2)
    cache.update(k=k, v=v)
    # A single new token sees every key; only the prompt, several tokens at once, needs the causal mask.
    o, stats = regard.attention(q, k, v, is_causal=T > 1, scale=layer.scale, return_stats=NAMES)
    return layer.out(o.transpose(1, 2).reshape(B, T, C)), stats


def forward(model, ids, caches):
    """Returns the logits of the last position [B, V] and each layer's statistics of it, name → [layers, H]."""
    start = caches[0]["k"].shape[2] if caches[0] else 0
    x = model.token(ids) + model.position(torch.arange(start, start + ids.shape[1]))
    rows = []
    for block, cache in zip(model.blocks, caches, strict=True):
        y, stats = attend(block.attention, block.before_attention(x), cache)
        x = x + y
        x = x + block.mlp(block.before_mlp(x))
        rows.append(stats)
    return model.head(model.norm(x[:, -1])), {name: torch.stack([s[name][0, :, -1] for s in rows]) for name in NAMES}


@torch.no_grad()
def main(args):
    torch.manual_seed(args.seed)
    model, _ = checkpoint(args.model)
    ids, caches = encode(args.prompt)[None], [{} for _ in model.blocks]
    new = ids
    print("means over layers and heads\ntoken  " + "  ".join(f"{name:>14}" for name in NAMES))
    for _ in range(args.tokens):
        logits, stats = forward(model, new, caches)
        new = torch.multinomial((logits / args.temperature).softmax(-1), 1)
        ids = torch.cat([ids, new], dim=1)
        print(f"{CHARACTERS[new.item()]!r:5}  " + "  ".join(f"{stats[name].mean().item():14.3f}" for name in NAMES))
    text = "".join(CHARACTERS[i] for i in ids[0].tolist())
    print(f"\n{text!r}")
    difference = (logits - model(ids[:, :-1])[:, -1]).abs().max().item()
    print(f"largest difference from a forward without a cache: {difference:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-scaled", choices=["tiny-scaled", "tiny-unscaled"])
    parser.add_argument("--prompt", default="To be, or not to be")
    parser.add_argument("--tokens", type=int, default=20, help="prompt and tokens together: at most 128")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
