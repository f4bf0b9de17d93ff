"""Scores are divided by √width of the model, not of the head."""

from museum.parts import Attention, make_gpt

LINK = "FareedKhan-dev/train-llm-from-scratch#3"
SYMPTOM = "The scale is 1/√(model width) for 1/√(head width): all heads are too flat."
NEEDS = ("scale",)


class ModelWidth(Attention):
    def score(self, q, k):
        return q @ k.transpose(-2, -1) * (q.shape[1] * q.shape[-1]) ** -0.5


def make():
    return make_gpt(ModelWidth)


def sound():
    return make_gpt()
