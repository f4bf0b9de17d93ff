"""Keys get the mean of their chunk, later tokens of the chunk included: the loss falls too far."""

import torch
from torch import nn

from museum.parts import Attention, make_gpt

LINK = "karpathy/nanochat#844"
SYMPTOM = "A summary of each block of tokens is given to all its positions: early ones read late ones."
NEEDS = ("future",)

CHUNK = 8


class Summaries(Attention):
    def summarise(self, k):
        length = k.shape[2]
        blocks = nn.functional.pad(k, (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK))
        return blocks.mean(3, keepdim=True).expand_as(blocks).flatten(2, 3)[:, :, :length]

    def split(self, x):
        q, k, v = super().split(x)
        return q, k + self.summarise(k), v + self.summarise(v)


class Before(Summaries):
    def summarise(self, k):
        blocks = super().summarise(k)
        return torch.cat([torch.zeros_like(blocks[:, :, :CHUNK]), blocks[:, :, :-CHUNK]], 2)


def make():
    return make_gpt(Summaries)


def sound():
    return make_gpt(Before)
