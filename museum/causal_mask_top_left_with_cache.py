"""is_causal aligns the triangle at the top left: a chunk after a cached prefix does not see the prefix."""

from torch.nn.functional import scaled_dot_product_attention

from museum.parts import attend, make_batches, make_lm

LINK = "pytorch/executorch#21749"
SYMPTOM = "With a cache and more than one new token, the first new token sees key 0 alone."
NEEDS = ("cache", "chunk", "decod")


def fused(module, query, key, value, attention_mask, **more):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    heads = scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
    return heads.transpose(1, 2).contiguous(), None


def make_llama(function):
    model = make_lm("llama", function)
    return model, make_batches(model), {}


def make():
    return make_llama(fused)


def sound():
    return make_llama(attend)
