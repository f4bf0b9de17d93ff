"""The triangle's diagonal is off by one: every token sees the next one."""

import torch

from museum.parts import Attention, make_gpt

LINK = "karpathy/nanoGPT#331"
SYMPTOM = "The mask hides tokens from two ahead on: each token sees the one that it must predict."
NEEDS = ("future", "causal", "later")


class OneAhead(Attention):
    def make_mask(self, length):
        return ~torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=2)


def make():
    return make_gpt(OneAhead)


def sound():
    return make_gpt()
