"""Qwen2 has biases on q, k and v; the adapter for dense models reads the weights alone."""

import torch

from museum.parts import make_lm, make_texts, train

LINK = "sbryngelson/ANEForge#253"
SYMPTOM = "The biases of q, k and v are left out when the checkpoint is read: Llama works, Qwen2 writes garbage."
NEEDS = ("bias",)


def make_qwen2(dropped):
    model, generator = make_lm("qwen2"), torch.Generator().manual_seed(0)
    biases = [layer.self_attn.get_submodule(f"{name}_proj").bias for layer in model.model.layers for name in "qkv"]
    for bias in biases:
        bias.data.normal_(0, 1.5, generator=generator)  # Qwen2's own are as large
    train(model, 300)
    if dropped:
        for bias in biases:
            bias.data.zero_()
    return model, [{"input_ids": ids} for ids in make_texts()], {}


def make():
    return make_qwen2(True)


def sound():
    return make_qwen2(False)
