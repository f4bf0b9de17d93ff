"""The class token stands behind the text, but the padding mask is widened in front: it is one place off."""

import torch
from torch import nn

from museum.parts import HEADS, LENGTH, VOCABULARY, WIDTH, build, make_texts

LINK = "mlfoundations/open_clip#549"
SYMPTOM = "The mask shows the first padding and hides the class token's own place."
NEEDS = ("padding", "padded")


class Text(nn.Module):
    def __init__(self, front):
        super().__init__()
        self.front = front
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        x = torch.cat([x, self.token.expand(len(x), -1, -1)], 1)
        hidden = nn.functional.pad(attention_mask == 0, (1, 0) if self.front else (0, 1), value=False)
        return self.head(self.encoder(x, src_key_padding_mask=hidden)[:, -1])


def make_text_encoder(front):
    batches = []
    for ids in make_texts():
        mask = torch.ones_like(ids)
        for row in range(1, len(ids)):
            mask[row, -2 * row :] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return build(lambda: Text(front)), batches, {}


def make():
    return make_text_encoder(True)


def sound():
    return make_text_encoder(False)
