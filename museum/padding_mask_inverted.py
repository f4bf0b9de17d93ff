"""nn.TransformerEncoder hides where its mask is True; it is given 1 = keep."""

import torch
from torch import nn

from museum.parts import HEADS, LENGTH, VOCABULARY, WIDTH, build, make_texts

LINK = "mlwithme/TransformerTranslation#6"
SYMPTOM = "Real tokens are hidden and padding is read: the mask's meaning is the other way round."
NEEDS = ("padding", "opposite", "invert")


class Encoder(nn.Module):
    def __init__(self, inverted):
        super().__init__()
        self.inverted = inverted
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = attention_mask.bool() if self.inverted else attention_mask == 0
        return self.head(self.encoder(x, src_key_padding_mask=hidden))


def make_encoder(inverted):
    batches = []
    for ids in make_texts():
        mask = torch.ones_like(ids)
        for row in range(len(ids)):
            mask[row, 32 - row - 2 :] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return build(lambda: Encoder(inverted)), batches, {}


def make():
    return make_encoder(True)


def sound():
    return make_encoder(False)
