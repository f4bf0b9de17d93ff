"""nn.TransformerEncoderLayer without batch_first is given [B, N, C]: rows attend to each other, tokens do not."""

import torch
from torch import nn

from museum.parts import HEADS, LENGTH, VOCABULARY, WIDTH, build, make_texts

LINK = "om-ai-lab/OmDet#19"
SYMPTOM = "Attention runs over the batch: a row's answer depends on its neighbours, a token sees no other token."
NEEDS = ("batch", "row", "axis")


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=batch_first) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make():
    return build(lambda: Encoder(False)), make_texts(), {}


def sound():
    return build(lambda: Encoder(True)), make_texts(), {}
