"""The configuration rotates half of each head; the model rotates all of it."""

import torch
from torch import nn

from museum.parts import make_batches, make_lm

LINK = "AI-Hypercomputer/maxtext#4616"
SYMPTOM = "partial_rotary_factor does not reach the rotation: every channel turns."
NEEDS = ("partial", "fraction", "whole head", "rotary_factor", "rotary_dim")


class Whole(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, width, 2).float() / width), persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def make_phi(whole):
    model = make_lm("phi")
    if whole:
        width = model.config.hidden_size // model.config.num_attention_heads
        model.model.rotary_emb = Whole(width)
        for layer in model.model.layers:
            layer.self_attn.rotary_ndims = width
    return model, make_batches(model), {}


def make():
    return make_phi(True)


def sound():
    return make_phi(False)
