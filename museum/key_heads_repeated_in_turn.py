"""Key-value heads are tiled (0 1 0 1) where each should be repeated (0 0 1 1)."""

from museum.parts import attend, make_batches, make_lm

LINK = "ekzhang/jax-js#180"
SYMPTOM = "Query heads read the key-value heads of another group."
NEEDS = ("group", "repeat", "GQA", "key-value head")


def tiled(module, query, key, value, attention_mask, **more):
    return attend(module, query, key, value, attention_mask, repeat=lambda x, times: x.repeat(1, times, 1, 1), **more)


def make_llama(function):
    model = make_lm("llama", function, num_key_value_heads=2)
    return model, make_batches(model), {}


def make():
    return make_llama(tiled)


def sound():
    return make_llama(attend)
