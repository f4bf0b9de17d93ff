"""q, k and v are fused one after another; the model reads them group by group."""

import torch

from museum.parts import make_lm, make_texts, train

LINK = "NVIDIA-NeMo/RL#2802"
SYMPTOM = "cat(q, k, v) is loaded where the rows of each group belong together: q, k and v are scrambled."
NEEDS = ("order", "fused", "interleav", "group")


def read_by_groups(attention, groups):
    """Loads cat(q, k, v) as if it were [group: its queries, its key, its value]."""
    parts = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
    rows = torch.cat(parts).unflatten(0, (groups, -1))
    width = rows.shape[1] // (parts[0].shape[0] // parts[1].shape[0] + 2)
    read = [one.flatten(0, 1).clone() for one in rows.split([rows.shape[1] - 2 * width, width, width], 1)]
    for part, value in zip(parts, read, strict=True):
        part.copy_(value)


def make_llama(wrong):
    model = train(make_lm("llama", num_key_value_heads=2), 600)
    if wrong:
        with torch.no_grad():
            for layer in model.model.layers:
                read_by_groups(layer.self_attn, 2)
    return model, [{"input_ids": ids} for ids in make_texts()], {}


def make():
    return make_llama(True)


def sound():
    return make_llama(False)
