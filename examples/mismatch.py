"""From a mismatch to its cause: two processes and a decoder without torch, held to the same fingerprints.

    python examples/mismatch.py

transformers (eager, bfloat16) against attn_implementation="regard", once with the logits doubled; a decoder in numpy,
written out with regard_tap.py, once with rotary positions paired as (2j, 2j + 1) instead of (j, j + d/2).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HEADS, GROUPS, WIDTH, LAYERS, LENGTH, EPSILON = 4, 2, 16, 2, 24, 1e-6


def make_llama(attention):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=HEADS * WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, vocab_size=100)
    config = LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=GROUPS, rms_norm_eps=EPSILON, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()
    for layer in model.model.layers:  # random weights attend to nothing; sharper queries and keys do
        layer.self_attn.q_proj.weight.data *= 8.0
        layer.self_attn.k_proj.weight.data *= 8.0
    return model, torch.arange(LENGTH)[None] * 7 % 100


def train(folder):
    import regard

    model, ids = make_llama("eager")
    weights = {name: x.numpy() for name, x in model.state_dict().items()}
    np.savez(folder / "weights.npz", ids=ids.numpy(), **weights)
    regard.fingerprint(model, [dict(input_ids=ids)]).save(folder / "float32.regard")
    regard.fingerprint(model.bfloat16(), [dict(input_ids=ids)]).save(folder / "bfloat16.regard")


def roll_out(folder):  # and the comparisons
    import regard.hf

    model = make_llama("regard")[0].bfloat16()
    print("another kernel:", regard.compare(folder / "bfloat16.regard", model).line)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    print("scaled twice:", regard.compare(folder / "bfloat16.regard", model).line)
    for x in ("halves", "pairs"):
        print(f"numpy, {x}:", regard.compare(folder / "float32.regard", folder / x).line)


def port(folder):
    sys.modules["torch"] = None  # whatever imported it would fail
    [run_in_numpy(np.load(folder / "weights.npz"), folder / pairing, pairing) for pairing in ("halves", "pairs")]


def run_in_numpy(weights, folder, pairing):
    from regard_tap import Tap

    ids = weights["ids"]
    tap = Tap(folder, tokens=ids, model="numpy", heads=HEADS, groups=GROUPS)
    angle = np.arange(LENGTH)[:, None, None] * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)

    def rotate(x):  # [batch, tokens, heads, width]
        a, b = np.split(x, 2, -1) if pairing == "halves" else (x[..., ::2], x[..., 1::2])
        turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return np.concatenate(turned, -1) if pairing == "halves" else np.stack(turned, -1).reshape(x.shape)

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPSILON) * weights[f"model.{name}.weight"]

    x = weights["model.embed_tokens.weight"][ids]
    for at in [f"layers.{i}" for i in range(LAYERS)]:
        y = norm(tap(f"{at}.input", x), f"{at}.input_layernorm")
        stems = [f"{at}.{{}}self_attn.{part}_proj" for part in "qkv"]
        q, k, v = (tap(one.format("at."), y @ weights[f"model.{one.format('')}.weight"].T) for one in stems)
        q, k, v = (z.reshape(*ids.shape, -1, WIDTH) for z in (q, k, v))
        q, k, v = tap(f"{at}.q", rotate(q)), tap(f"{at}.k", rotate(k)), tap(f"{at}.v", v)
        k, v = (np.repeat(z, HEADS // GROUPS, 2) for z in (k, v))
        s = np.where(np.tri(LENGTH, dtype=bool), np.einsum("bihd,bjhd->bhij", q, k) * WIDTH**-0.5, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        o = tap(f"{at}.attention", np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v))
        x = x + o.reshape(x.shape) @ weights[f"model.{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ weights[f"model.{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = tap(f"{at}.output", x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"model.{at}.mlp.down_proj.weight"].T)
    tap("final", norm(x, "norm") @ weights["lm_head.weight"].T)
    tap.close()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"train": train, "port": port, "roll_out": roll_out}[sys.argv[1]](Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as made:  # each step in a process of its own
            [subprocess.run([sys.executable, __file__, x, made], check=True) for x in ("train", "port", "roll_out")]
