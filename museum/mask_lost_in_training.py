"""With dropout the fused call is left, and the fallback forgets the causal mask: only training sees the future."""

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

from museum.parts import Attention, make_gpt

LINK = "keras-team/keras#23038"
SYMPTOM = "The fallback for dropout has no mask: the loss falls in training and is bad in evaluation."
NEEDS = ("training", "train")


class Fused(Attention):
    masked = True

    def forward(self, x, hidden=None):
        q, k, v = self.split(x)
        if not self.training:
            heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = self.score(q, k)
            if self.masked:
                scores = scores.masked_fill(~self.mask[: x.shape[1], : x.shape[1]], torch.finfo(x.dtype).min)
            heads = dropout(scores.softmax(-1), 0.1) @ v
        return self.proj(self.merge(heads))


class Lost(Fused):
    masked = False


def make():
    return make_gpt(Lost)


def sound():
    return make_gpt(Fused)
