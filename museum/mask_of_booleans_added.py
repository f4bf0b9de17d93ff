"""The mask maker gives booleans (True shows), the attention adds them: hidden keys get + 0, shown ones + 1."""

import torch

from museum.parts import attend, make_batches, make_lm

LINK = "huggingface/transformers#41443"
SYMPTOM = "A boolean mask is added to the scores: nothing is hidden, and no error says so."
NEEDS = ("mask", "future", "causal")


def added(module, query, key, value, attention_mask, **more):
    return attend(module, query, key, value, (attention_mask >= 0).to(query.dtype), **more)


def filled(module, query, key, value, attention_mask, **more):
    shown = attention_mask >= 0
    mask = torch.zeros(shown.shape, dtype=query.dtype, device=query.device)
    return attend(module, query, key, value, mask.masked_fill(~shown, torch.finfo(query.dtype).min), **more)


def make_qwen3(function):
    model = make_lm("qwen3", function)
    return model, make_batches(model), {}


def make():
    return make_qwen3(added)


def sound():
    return make_qwen3(filled)
