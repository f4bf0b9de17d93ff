"""The attention function builds its own causal mask: padding on the left is seen by every token."""

from museum.parts import attend, keep_causal, make_batches, make_lm

LINK = "pytorch/pytorch#131254"
SYMPTOM = "attention_mask is dropped on the way: a padded row answers otherwise than the same row alone."
NEEDS = ("padding", "padded")


def plain(module, query, key, value, attention_mask, **more):
    return attend(module, query, key, value, keep_causal(query, key), **more)


def make_padded(function):
    model = make_lm("llama", function)
    return model, make_batches(model, padding=6), {}


def make():
    return make_padded(plain)


def sound():
    return make_padded(attend)
