"""Heads are merged by a view without the transpose: head positions are spliced into time."""

from museum.parts import Attention, make_gpt

LINK = "meta-pytorch/opacus#825"
SYMPTOM = "The output [B, H, N, d] is viewed as [B, N, H·d] without a transpose: tokens get parts of other tokens."
NEEDS = ("view", "merge", "future", "transpose")


class MergedByView(Attention):
    def merge(self, heads):
        batch, count, length, width = heads.shape
        return heads.contiguous().view(batch, length, count * width)


def make():
    return make_gpt(MergedByView)


def sound():
    return make_gpt()
