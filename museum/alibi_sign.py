"""ALiBi is added with the opposite sign: far keys are favoured."""

import torch
from torch import nn

from museum.parts import Attention, TinyGPT, build, make_texts, train

LINK = "meta-pytorch/attention-gym#86"
SYMPTOM = "The bias grows with the distance instead of falling."
NEEDS = ("alibi", "sign", "distance", "far")


class Falling(Attention):
    sign = -1.0

    def score(self, q, k):
        places = torch.arange(q.shape[-2], device=q.device)
        slopes = 2.0 ** -(8 / self.heads * torch.arange(1, self.heads + 1, device=q.device))
        bias = self.sign * slopes[:, None, None] * (places[:, None] - places)
        return super().score(q, k) + bias


class Growing(Falling):
    sign = 1.0


class Model(TinyGPT):
    def __init__(self, attention):
        super().__init__(attention)
        self.wpe = None

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def make_alibi(attention) -> tuple[nn.Module, list, dict]:
    return train(build(lambda: Model(attention))), make_texts(), {}


def make():
    return make_alibi(Growing)


def sound():
    return make_alibi(Falling)
