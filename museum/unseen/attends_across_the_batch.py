"""OmDet's encoder layer: nn.MultiheadAttention without batch_first on inputs [batch, tokens, width]."""

import torch
from torch import nn

from museum.unseen.parts import HEADS, MAXLEN, VOCAB, WIDTH, fit, kept, masked_batch, masked_loss, seeded

LINK = "om-ai-lab/OmDet#19"
SYMPTOM = "Inference on a batch differs from inference one by one: attention runs over the batch, not over the tokens."
NEEDS = (
    "batch_first",
    "other rows",
    "across the batch",
    "other sequences",
    "other examples",
    "of the batch",
    "batch dimension",
)


class EncoderLayer(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0, batch_first=batch_first)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, src, pos):
        q = k = src + pos
        src = self.norm1(src + self.self_attn(q, k, src)[0])
        return self.norm2(src + self.linear2(torch.relu(self.linear1(src))))


class Model(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAXLEN, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(batch_first) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids):
        x, pos = self.embed(input_ids), self.pos(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x, pos)
        return self.head(x)


def batch(seed, rows=8):
    one = masked_batch(seed, rows, 24, padded=False)
    return {"input_ids": one["input_ids"], "labels": one["labels"]}


@kept
def weights():
    return fit(seeded(lambda: Model(True)), lambda m, s: masked_loss(m, batch(7000 + s)), 400, 2e-3).state_dict()


def build(batch_first):
    model = seeded(lambda: Model(batch_first))
    model.load_state_dict(weights())
    return model.eval(), [{"input_ids": batch(3, 6)["input_ids"]}, {"input_ids": batch(4, 6)["input_ids"]}], {}


def make():
    return build(False)


def sound():
    return build(True)
