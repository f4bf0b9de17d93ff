"""An additive mask is taken for one of ones and zeros: allowed keys get −1e9, under which all scores are equal."""

import torch

from museum.parts import Attention, make_gpt

LINK = "harvard-edge/cs249r_book#1785"
SYMPTOM = "(1 − mask) · (−1e9) of a mask that is 0 where keys are shown: weights are uniform over the past."
NEEDS = ("uniform", "mask", "flat", "equal")


class Converted(Attention):
    def add(self, mask):
        return mask

    def weigh(self, scores, hidden):
        length = scores.shape[-1]
        mask = torch.zeros(length, length).masked_fill(~self.mask[:length, :length], float("-inf"))
        return (scores + self.add(mask)).softmax(-1)


class Twice(Converted):
    def add(self, mask):
        return torch.where(mask == 0, (1 - mask) * -1e9, mask)


def make():
    return make_gpt(Twice)


def sound():
    return make_gpt(Converted)
