"""The attention function of the sliding layers ignores its window: they see the whole text."""

from museum.parts import attend, keep_causal, make_batches, make_lm

LINK = "Comfy-Org/ComfyUI#11409"
SYMPTOM = "layer_types has sliding layers, but their attention is plainly causal."
NEEDS = ("window",)


def whole(module, query, key, value, attention_mask, sliding_window=None, **more):
    return attend(module, query, key, value, keep_causal(query, key), **more)


def make_gemma(function):
    model = make_lm("gemma2", function, sliding_window=8)
    return model, make_batches(model), {}


def make():
    return make_gemma(whole)


def sound():
    return make_gemma(attend)
