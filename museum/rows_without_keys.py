"""Left padding and −inf: rows that see no key are 0 / 0 and the whole output is NaN."""

import torch

from museum.parts import Attention, build, make_texts, train
from museum.parts import TinyGPT as Model

LINK = "pytorch/pytorch#27968"
SYMPTOM = "A padded row of the mask is −inf everywhere: softmax gives NaN, which spreads."
NEEDS = ("nan", "finite", "no key", "nothing")


class Infinite(Attention):
    def weigh(self, scores, hidden):
        length = scores.shape[-1]
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        return scores.softmax(-1)


def make_padded(attention):
    model = train(build(lambda: Model(attention)))
    batches = []
    for ids in make_texts():
        mask = torch.ones_like(ids)
        mask[1::2, :5] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return model, batches, {}


def make():
    return make_padded(Infinite)


def sound():
    return make_padded(Attention)
