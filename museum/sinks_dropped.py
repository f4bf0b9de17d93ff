"""The fused kernel has no argument for sinks: softmax runs over the keys alone."""

import torch

from museum.parts import attend, make_batches, make_lm

LINK = "vllm-project/vllm-metal#212"
SYMPTOM = "The model's sinks are parameters that no call receives."
NEEDS = ("sink",)


def without(module, query, key, value, attention_mask, s_aux=None, **more):
    return attend(module, query, key, value, attention_mask, **more)


def make_gpt_oss(function):
    model = make_lm("gpt_oss", function)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, 2.0, 0.5, 1.5])[: len(layer.self_attn.sinks)])
    return model, make_batches(model), {}


def make():
    return make_gpt_oss(without)


def sound():
    return make_gpt_oss(attend)
