"""An image is cut into patches by view alone: a token holds rows of one channel and no patch."""

import torch
from torch import nn

from museum.parts import HEADS, WIDTH, build

LINK = "duoan/TorchCode#21"
SYMPTOM = "The shapes are right, so tests pass; a token mixes pixels from the whole width of the image."
NEEDS = ("patch",)

SIDE, PATCH = 32, 8


class ViT(nn.Module):
    """A vision transformer of two layers; a bug overrides one of its methods."""

    def __init__(self):
        super().__init__()
        self.count = (SIDE // PATCH) ** 2
        self.proj = nn.Linear(3 * PATCH**2, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, self.count + 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def cut(self, x):
        side = SIDE // PATCH
        return x.view(len(x), 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(len(x), self.count, -1)

    def place(self, x):
        return x + self.positions

    def pool(self, x):
        return x[:, 0]

    def forward(self, pixel_values):
        x = self.proj(self.cut(pixel_values))
        x = self.place(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        return self.head(self.pool(self.encoder(x)))


class ByView(ViT):
    def cut(self, x):
        return x.view(len(x), self.count, -1)


def make_vit(kind):
    generator = torch.Generator().manual_seed(0)
    return build(kind), [{"pixel_values": torch.randn(4, 3, SIDE, SIDE, generator=generator)} for _ in range(2)], {}


def make():
    return make_vit(ByView)


def sound():
    return make_vit(ViT)
