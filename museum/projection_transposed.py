"""A converter transposes a square output projection: shapes fit, values do not."""

import torch

from museum.parts import make_gpt

LINK = "skyzh/tiny-llm#60"
SYMPTOM = "One layer's output projection is stored as [in, out] and read as [out, in]."
NEEDS = ("transpos",)


def make():
    model, batches, options = make_gpt()
    weight = model.blocks[1].attn.proj.weight
    with torch.no_grad():
        weight.copy_(weight.T.clone())
    return model, batches, options


def sound():
    return make_gpt()
