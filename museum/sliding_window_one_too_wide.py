"""The kernel's window counts the keys before the token, the configuration counts the token too: 9 keys for 8."""

import torch

from museum.parts import attend, keep_causal, make_batches, make_lm

LINK = "huggingface/transformers#39408"
SYMPTOM = "A window of w is passed on as w keys to the left: w + 1 keys are visible."
NEEDS = ("window",)


def inclusive(module, query, key, value, attention_mask, sliding_window=None, **more):
    mask = keep_causal(query, key)
    if sliding_window is not None:
        far = torch.ones_like(mask, dtype=torch.bool).tril(key.shape[2] - query.shape[2] - sliding_window - 1)
        mask = mask.masked_fill(far, torch.finfo(torch.float32).min)
    return attend(module, query, key, value, mask, **more)


def make_mistral(function):
    model = make_lm("mistral", function, sliding_window=8)
    return model, make_batches(model), {}


def make():
    return make_mistral(inclusive)


def sound():
    return make_mistral(attend)
