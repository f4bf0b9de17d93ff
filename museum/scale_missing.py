"""Scores are not divided by √d."""

from museum.parts import Attention, make_gpt

LINK = "delzac/cntkx#10"
SYMPTOM = "The scale 1/√d is missing: logits are √d times too large."
NEEDS = ("scale",)


class NoScale(Attention):
    def score(self, q, k):
        return q @ k.transpose(-2, -1)


def make():
    return make_gpt(NoScale)


def sound():
    return make_gpt()
