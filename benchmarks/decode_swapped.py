"""Tokens per second of greedy decoding: sdpa, under `regard.using`, and by attn_implementation="regard", in turns.

PYTHONPATH=. python3 benchmarks/decode_swapped.py [--tokens 60] [--layers 4] [--width 128] [--turns 3] [--device cuda]

Each line: way, tokens per second (best of the turns), and the ratio to sdpa's.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import transformers

import regard
import regard.hf

WAYS = {
    "sdpa": ("sdpa", None),
    'using(normalizer="entmax15")': ("sdpa", dict(normalizer="entmax15")),
    "using(softcap=50)": ("sdpa", dict(softcap=50.0)),
    "regard": ("regard", None),
    "regard:entmax15": ("regard:entmax15", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 60), ("layers", 4), ("width", 128), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=given.width, intermediate_size=2 * given.width, num_hidden_layers=given.layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, max_position_embeddings=given.tokens + 64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(given.device)
    ids = torch.arange(10, 26, device=given.device)[None]
    best: dict[str, float] = {}
    greedy = dict(max_new_tokens=given.tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    for turn in range(given.turns + 1):  # the first compiles
        for way, (implementation, options) in WAYS.items():
            model.set_attn_implementation(implementation)
            with contextlib.nullcontext() if options is None else regard.using(model, **options):
                start = time.perf_counter()
                out = model.generate(ids, **greedy)
                seconds = time.perf_counter() - start
            if turn:
                best[way] = max(best.get(way, 0.0), (out.shape[1] - ids.shape[1]) / seconds)
    for way, speed in best.items():
        print(f"| {way} | {speed:.0f} | {speed / best['sdpa']:.2f} |")


if __name__ == "__main__":
    main()
