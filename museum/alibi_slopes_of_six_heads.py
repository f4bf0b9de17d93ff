"""ALiBi's slopes are one geometric series also where the number of heads is no power of two."""

import torch
from torch import nn

from museum.parts import VOCABULARY, Attention, Block, TinyGPT, build, make_texts, train

LINK = "ml-explore/mlx#3071"
SYMPTOM = "With six heads the model was trained with slopes 1/4, 1/16, …, 1/2, 1/8; the port uses 2^(−8h/6)."
NEEDS = ("alibi", "slope")

TRAINED = 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0, 1.0, 3.0])
SERIES = 2.0 ** -(8 / 6 * torch.arange(1.0, 7.0))


class Falling(Attention):
    def __init__(self):
        super().__init__(width=48, heads=6)
        self.slopes = TRAINED

    def score(self, q, k):
        places = torch.arange(q.shape[-2], device=q.device)
        return super().score(q, k) - self.slopes[:, None, None] * (places[:, None] - places)


class Model(TinyGPT):
    def __init__(self):
        super().__init__(Falling)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 48), None
        self.blocks = nn.ModuleList(Block(Falling(), 48) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(48), nn.Linear(48, VOCABULARY, bias=False)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def make_alibi(slopes):
    model = train(build(Model), 300)
    for block in model.blocks:
        block.attn.slopes = slopes
    return model, make_texts(), {}


def make():
    return make_alibi(SERIES)


def sound():
    return make_alibi(TRAINED)
