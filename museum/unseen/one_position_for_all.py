"""`x + self.pe[:, x.shape[1], :]` lacks a colon: every token gets the encoding of one position, the length."""

import math

import torch
from torch import nn

from museum.unseen.parts import VOCAB, WIDTH, fit_lm, kept, lm_batches, seeded

LINK = "DiffPoseTalk/DiffPoseTalk#20"
SYMPTOM = "PositionalEncoding adds one vector to all elements; the model is blind to order, and nothing fails."
NEEDS = ("position", "order")


class PositionalEncoding(nn.Module):
    slices = True

    def __init__(self, width=WIDTH, length=128):
        super().__init__()
        at = torch.arange(length)[:, None]
        freq = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, length, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(at * freq), torch.cos(at * freq)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + (self.pe[:, : x.shape[1], :] if self.slices else self.pe[:, x.shape[1], :])


class WithoutColon(PositionalEncoding):
    slices = False


class LM(nn.Module):
    def __init__(self, encoding=PositionalEncoding):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), encoding()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.lm_head(self.encoder(self.pos(self.embed(ids)), mask=mask))


@kept
def good_weights():
    return fit_lm(seeded(LM), 500, 3e-3).state_dict()


@kept
def bad_weights():
    return fit_lm(seeded(lambda: LM(WithoutColon)), 500, 3e-3).state_dict()


def build(encoding, weights):
    model = seeded(lambda: LM(encoding))
    model.load_state_dict(weights())
    return model.eval(), [one["input_ids"] for one in lm_batches()], {}


def make():
    return build(WithoutColon, bad_weights)


def sound():
    return build(PositionalEncoding, good_weights)
