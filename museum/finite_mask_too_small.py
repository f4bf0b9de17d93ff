"""Masked scores get −1e4; logits are larger than that: hidden keys are seen."""

import torch

from museum.parts import Attention, make_gpt

LINK = "huggingface/transformers#17121"
SYMPTOM = "The mask's value does not exceed the logits' range, so that large logits of hidden keys win."
NEEDS = ("mask", "finite", "future")


class Finite(Attention):
    lowest = -1e4

    def weigh(self, scores, hidden):
        length = scores.shape[-1]
        return (scores + self.lowest * ~self.mask[:length, :length]).softmax(-1)


class Lowest(Finite):
    lowest = torch.finfo(torch.float32).min


def make_large(attention):
    model, batches, options = make_gpt(attention)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:64] *= 60
    return model, batches, {**options, "ignore": ["RG3", "RG401"]}  # logits of 10,000 are in both


def make():
    return make_large(Finite)


def sound():
    return make_large(Lowest)
