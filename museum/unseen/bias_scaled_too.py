"""The kernel folds the scale into the exponent: softmax((QK + bias) · scale), so the position bias shrinks by √d."""

import math

import torch
from torch import nn

from museum.unseen.parts import Encoder, EncoderAttention, fit_masked, inputs_only, kept, masked_batch, seeded

LINK = "tenstorrent/tt-metal#55337"
SYMPTOM = "A finite additive bias (T5, ALiBi) is attenuated by 1/sqrt(D); hard masks cannot show it."
NEEDS = ("bias",)


class Relative(EncoderAttention):
    """Learned bias per head and distance, clipped at 16, as a T5 encoder."""

    both = False

    def __init__(self):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(33, self.heads)

    def score(self, q, k):
        n = q.shape[2]
        distance = (torch.arange(n) - torch.arange(n)[:, None]).clamp(-16, 16) + 16
        bias = self.relative_attention_bias(distance).permute(2, 0, 1)
        scale = 1 / math.sqrt(q.shape[-1])
        scores = q @ k.transpose(-1, -2)
        return (scores + bias) * scale if self.both else scores * scale + bias


class Both(Relative):
    both = True


class Plain(Encoder):
    def embed(self, input_ids):
        return self.word(input_ids)


def blank(attention):
    model = seeded(lambda: Plain(attention))
    del model.position
    return model


@kept
def weights():
    return fit_masked(blank(Relative), 600, 5e-3).state_dict()


def build(attention):
    model = blank(attention)
    model.load_state_dict(weights())
    return model.eval(), [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)], {}


def make():
    return build(Both)


def sound():
    return build(Relative)
