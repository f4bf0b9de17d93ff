"""Learned positions are counted from the row's start, padding included."""

import torch

from museum.parts import TinyGPT, build, make_texts, train

LINK = "ndif-team/nnsight#672"
SYMPTOM = "Tokens of a row padded on the left get positions that are too high by the padding."
NEEDS = ("padding", "padded", "position")


class FromTheStart(TinyGPT):
    def place(self, input_ids, attention_mask):
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def make_padded(kind):
    model = train(build(kind))
    batches = []
    for ids in make_texts():
        mask = torch.ones_like(ids)
        mask[1::2, :5] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return model, batches, {}


def make():
    return make_padded(FromTheStart)


def sound():
    return make_padded(TinyGPT)
