"""The causal mask is a buffer of 24 tokens and is padded with "visible" for longer texts."""

import torch
from torch.nn.functional import pad

from museum.parts import Attention, make_gpt

LINK = "tenstorrent/tt-metal#48899"
SYMPTOM = "Tokens behind the 24th see the whole text: the mask's buffer is shorter than the text."
NEEDS = ("future", "causal", "later", "buffer")


class ShortBuffer(Attention):
    def weigh(self, scores, hidden):
        length, known = scores.shape[-1], 24
        shown = self.mask[: min(length, known), : min(length, known)]
        shown = pad(shown, (0, max(length - known, 0), 0, max(length - known, 0)), value=True)
        shown[:known, known:] = False
        return scores.masked_fill(~shown, torch.finfo(scores.dtype).min).softmax(-1)


def make():
    return make_gpt(ShortBuffer)


def sound():
    return make_gpt()
