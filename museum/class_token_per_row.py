"""The class token and the positions of a ViT have the size of the batch: each row has its own."""

import torch
from torch import nn

from museum.parts import HEADS, WIDTH, build

LINK = "ahmadchalhoub/research_implementations#2"
SYMPTOM = "Parameters [B, 1, width] for [1, 1, width]: an image's answer depends on its place in the batch."
NEEDS = ("batch", "row", "neighbour")

ROWS = 4


class ViT(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.token = nn.Parameter(torch.randn(rows, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(rows, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixel_values):
        rows = len(pixel_values)
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        token, positions = (one[:rows].expand(rows, -1, -1) for one in (self.token, self.positions))
        return self.head(self.encoder(torch.cat([token, x], 1) + positions)[:, 0])


def make_vit(rows):
    generator = torch.Generator().manual_seed(0)
    batches = [{"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator)} for _ in range(2)]
    return build(lambda: ViT(rows)), batches, {}


def make():
    return make_vit(ROWS)


def sound():
    return make_vit(1)
