"""A cache of the window's size writes the first token past it over the last key instead of rolling first."""

import torch

from museum.parts import make_batches, make_lm

LINK = "huggingface/transformers#37574"
SYMPTOM = "Once the text is longer than the window, the newest key replaces its neighbour and old keys stay."
NEEDS = ("cache", "decod", "window")


def make_mistral(wrong):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    model = make_lm("mistral", sliding_window=8)
    inner = model.model.forward

    def keep(layer):
        update = layer.update

        def write(key, value, *more, **options):
            full = layer.is_initialized and layer.keys is not None and layer.keys.shape[-2] >= 7
            if not (full and key.shape[-2] == 1):
                return update(key, value, *more, **options)
            layer.cumulative_length += 1
            layer.keys = torch.cat([layer.keys[..., :-1, :], key], -2)
            layer.values = torch.cat([layer.values[..., :-1, :], value], -2)
            old = layer.keys[..., :1, :], layer.values[..., :1, :]
            return torch.cat([old[0], layer.keys], -2), torch.cat([old[1], layer.values], -2)

        layer.update, layer.museum = write, True

    def forward(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        for layer in getattr(past_key_values, "layers", ()):
            if isinstance(layer, DynamicSlidingWindowLayer) and not hasattr(layer, "museum"):
                keep(layer)
        return inner(input_ids, attention_mask, position_ids, past_key_values, **more)

    if wrong:
        model.model.forward = forward
    return model, make_batches(model), {}


def make():
    return make_mistral(True)


def sound():
    return make_mistral(False)
