"""The decoder's cross-attention takes keys from the target: the source never reaches the output."""

import torch
from torch import nn

from museum.parts import HEADS, LENGTH, VOCABULARY, WIDTH, build, make_text

LINK = "pengshuang/Transformer#5"
SYMPTOM = "Cross-attention reads its own stream: the answer does not depend on the source."
NEEDS = ("source", "cross", "encoder", "ignored", "stream")


class Decoder(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embed(self, ids):
        return self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, src, tgt):
        memory, x = self.encoder(self.embed(src)), self.embed(tgt)
        hidden = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        y = self.norms[0](x)
        x = x + self.attend(y, y, y, attn_mask=hidden, need_weights=False)[0]
        y = self.norms[1](x)
        read, mask = (y, hidden) if self.wrong else (memory, None)
        x = x + self.cross(y, read, read, attn_mask=mask, need_weights=False)[0]
        return self.head(self.norms[2](x))


def make_pairs(wrong):
    batches = [{"src": make_text(4, 20, at), "tgt": make_text(4, 24, at + 7)} for at in (1, 2)]
    return build(lambda: Decoder(wrong)), batches, {}


def make():
    return make_pairs(True)


def sound():
    return make_pairs(False)
