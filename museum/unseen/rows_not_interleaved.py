"""Rows of q and k for interleaved rotary pairs go into code that rotates halves, without the permutation."""

import torch

from museum.unseen.parts import llama, lm_batches

LINK = "ooples/AiDotNet#2074"
SYMPTOM = "Every Llama-family checkpoint loads q/k in the wrong lane pairing: silently wrong logits."
NEEDS = ("interleav", "rotary", "rope", "rotat", "permut", "halves", "pairs")


def make():
    model, (batches, options) = llama(), (lm_batches(), {})
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                weight = getattr(layer.self_attn, name).weight  # rows: [heads, halves, d/2] -> [heads, d/2, halves]
                weight.copy_(weight.view(-1, 2, 8, 64).transpose(1, 2).reshape(-1, 64))
    return model, batches, options


def sound():
    return llama(), lm_batches(), {}
