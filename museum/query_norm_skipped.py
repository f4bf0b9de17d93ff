"""The norms of queries and keys are in the checkpoint and are not applied."""

from torch import nn

from museum.parts import make_batches, make_lm

LINK = "vllm-project/vllm-metal#659"
SYMPTOM = "q_norm and k_norm are looked up under another name and silently skipped."
NEEDS = ("norm",)


def make_qwen(skipped):
    model = make_lm("qwen3")
    if skipped:
        for layer in model.model.layers:
            layer.self_attn.q_norm.forward = layer.self_attn.k_norm.forward = nn.Identity().forward
    return model, make_batches(model), {}


def make():
    return make_qwen(True)


def sound():
    return make_qwen(False)
