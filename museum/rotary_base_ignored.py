"""The rotation uses 10,000 as its base, the configuration has 1,000,000."""

import torch

from museum.parts import make_batches, make_lm

LINK = "huggingface/candle#3746"
SYMPTOM = "rope_theta of the configuration does not reach the rotation."
NEEDS = ("base", "theta", "frequenc")


def make_llama(base):
    model = make_lm("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    rotary, width = model.model.rotary_emb, model.config.head_dim
    rotary.inv_freq = base ** -(torch.arange(0, width, 2).float() / width)
    rotary.original_inv_freq = rotary.inv_freq.clone()
    return model, make_batches(model), {}


def make():
    return make_llama(1e4)


def sound():
    return make_llama(1e6)
