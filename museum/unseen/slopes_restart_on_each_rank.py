"""ALiBi under tensor parallelism: each of two ranks computes slopes for its own heads, counted from 0."""

import math

import torch

from museum.unseen.parts import Encoder, EncoderAttention, fit_lm, kept, lm_batches, seeded

LINK = "flashinfer-ai/flashinfer#1606"
SYMPTOM = "Every rank but the first uses the wrong slopes; the merged output is that of another model."
NEEDS = ("slope", "alibi", "linear bias", "distance")


def slopes_of(heads):
    return torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])


class Alibi(EncoderAttention):
    ranks = 1

    def hide(self, scores, mask):
        n = scores.shape[-1]
        slopes = torch.cat([slopes_of(self.heads // self.ranks) for _ in range(self.ranks)])
        distance = torch.arange(n)[:, None] - torch.arange(n)
        scores = scores - slopes[:, None, None] * distance
        return super().hide(scores.masked_fill(distance < 0, -math.inf), mask)


class TwoRanks(Alibi):
    ranks = 2


class Bloomlike(Encoder):
    def embed(self, input_ids):
        return self.word(input_ids)


@kept
def weights():
    return fit_lm(seeded(lambda: Bloomlike(Alibi)), 500, 3e-3).state_dict()


def build(attention):
    model = seeded(lambda: Bloomlike(attention))
    del model.position
    model.load_state_dict({k: v for k, v in weights().items() if not k.startswith("position")})
    return model.eval(), lm_batches(), {}


def make():
    return build(TwoRanks)


def sound():
    return build(Alibi)
