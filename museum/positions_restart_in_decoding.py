"""Positions are counted from 0 in each call: with a cache every new token is at position 0."""

import torch

from museum.parts import make_batches, make_lm

LINK = "RobertCsordas/moeut#6"
SYMPTOM = "The offset of the rotation ignores the cache: decoding is at other positions than the full forward."
NEEDS = ("position", "rotary")


def make_llama(restart):
    model = make_lm("llama")
    inner = model.model.forward

    def forward(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        if position_ids is None or past_key_values is not None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return inner(input_ids, attention_mask, position_ids, past_key_values, **more)

    if restart:
        model.model.forward = forward
    return model, make_batches(model), {}


def make():
    return make_llama(True)


def sound():
    return make_llama(False)
