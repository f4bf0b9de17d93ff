"""layer_types gives the window to the upper layer; the attention gives it to the lower one."""

import torch

from museum.parts import attend, keep_causal, make_batches, make_lm

LINK = "huggingface/transformers#35896"
SYMPTOM = "max_window_layers is read the other way round: the window is in the layers that should see everything."
NEEDS = ("window",)

TYPES = ["full_attention", "sliding_attention"]


def swapped(module, query, key, value, attention_mask, sliding_window=None, **more):
    mask = keep_causal(query, key)
    if sliding_window is None:
        far = torch.ones_like(mask, dtype=torch.bool).tril(key.shape[2] - query.shape[2] - 8)
        mask = mask.masked_fill(far, torch.finfo(torch.float32).min)
    return attend(module, query, key, value, mask, **more)


def make_qwen2(function):
    model = make_lm("qwen2", function, use_sliding_window=True, sliding_window=8, layer_types=TYPES)
    return model, make_batches(model), {}


def make():
    return make_qwen2(swapped)


def sound():
    return make_qwen2(attend)
