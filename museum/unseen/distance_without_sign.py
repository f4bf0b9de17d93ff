"""Relative positions of a Conformer: sin(+p) is written for negative distances too, so −d equals +d."""

import math

import torch
from torch import nn

from museum.unseen.parts import WIDTH, Encoder, EncoderAttention, fit_masked, inputs_only, kept, masked_batch, seeded

LINK = "speechbrain/speechbrain#3073"
SYMPTOM = "RelPosEncXL cannot tell a key one step ahead from one a step behind; the attention row is symmetric."
NEEDS = ("position", "distance", "symmetr", "before and after", "left and right", "order", "direction")


def table(n, signed):
    distance = torch.arange(n - 1, -n, -1.0)[:, None]
    freq = torch.exp(torch.arange(0, WIDTH, 2).float() * -(math.log(10000.0) / WIDTH))
    pe = torch.zeros(2 * n - 1, WIDTH)
    pe[:, 0::2] = torch.sin((distance if signed else distance.abs()) * freq)
    pe[:, 1::2] = torch.cos(distance * freq)
    return pe


class RelPosMHAXL(EncoderAttention):
    signed = True

    def __init__(self):
        super().__init__()
        self.linear_pos = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.zeros(self.heads, 1, WIDTH // self.heads)) for _ in "uv")

    def score(self, q, k):
        b, h, n, d = q.shape
        p = self.linear_pos(table(n, self.signed)).view(2 * n - 1, h, d).transpose(0, 1)
        content = (q + self.pos_bias_u) @ k.transpose(-1, -2)
        place = (q + self.pos_bias_v) @ p.transpose(-1, -2)  # [B, H, N, 2N − 1]
        place = nn.functional.pad(place, (1, 0)).view(b, h, 2 * n, n)[:, :, 1:].view(b, h, n, 2 * n - 1)[..., :n]
        return (content + place) / math.sqrt(d)


class Unsigned(RelPosMHAXL):
    signed = False


class Conformer(Encoder):
    def embed(self, input_ids):
        return self.word(input_ids)


def blank(attention):
    model = seeded(lambda: Conformer(attention))
    del model.position
    return model


@kept
def good_weights():
    return fit_masked(blank(RelPosMHAXL), 500, 3e-3).state_dict()


@kept
def bad_weights():
    return fit_masked(blank(Unsigned), 500, 3e-3).state_dict()  # trained with the bug


def build(attention, weights):
    model = blank(attention)
    model.load_state_dict(weights())
    return model.eval(), [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)], {}


def make():
    return build(Unsigned, bad_weights)


def sound():
    return build(RelPosMHAXL, good_weights)
