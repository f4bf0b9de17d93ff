"""The cache is written under no_grad, in training too: keys and values get no gradient."""

import torch

from museum.parts import make_lm, make_texts

LINK = "huggingface/transformers#43923"
SYMPTOM = "use_cache is on by default: k_proj and v_proj never learn, and the loss falls all the same."
NEEDS = ("gradient",)


def make_llama(without):
    from transformers import DynamicCache

    class Cache(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *more, **options):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not without):
                return super().update(key_states, value_states, layer_idx, *more, **options)

    model = make_lm("llama")
    inner = model.model.forward

    def forward(*given, past_key_values=None, use_cache=None, **more):
        if past_key_values is None and use_cache is not False:
            past_key_values = Cache()
        return inner(*given, past_key_values=past_key_values, use_cache=use_cache, **more)

    model.model.forward = forward
    return model, [{"input_ids": ids, "labels": ids} for ids in make_texts()], {}


def make():
    return make_llama(True)


def sound():
    return make_llama(False)
