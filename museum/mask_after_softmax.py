"""The causal mask is multiplied in after softmax: early tokens' weights add up to much less than 1."""

from museum.parts import Attention, make_gpt

LINK = "huggingface/pytorch-image-models#2236"
SYMPTOM = "Weights are masked after softmax, so that the future still sits in the denominator."
NEEDS = ("after", "add up", "sum")


class MaskedAfter(Attention):
    def weigh(self, scores, hidden):
        length = scores.shape[-1]
        return scores.softmax(-1) * self.mask[:length, :length]


def make():
    return make_gpt(MaskedAfter)


def sound():
    return make_gpt()
