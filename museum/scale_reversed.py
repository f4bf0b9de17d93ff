"""The head's width enters the scale without the root: 1/d."""

from museum.parts import Attention, make_gpt

LINK = "AI-Hypercomputer/maxtext#1370"
SYMPTOM = "The scale's exponent is wrong: scores are divided by d instead of √d."
NEEDS = ("scale",)


class Reversed(Attention):
    def score(self, q, k):
        return q @ k.transpose(-2, -1) / q.shape[-1]


def make():
    return make_gpt(Reversed)


def sound():
    return make_gpt()
