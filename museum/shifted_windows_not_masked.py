"""Windows are shifted round the image's edge; padding after the shift leaves what came round unmasked."""

import torch
from torch import nn

from museum.parts import HEADS, WIDTH, build

LINK = "huggingface/pytorch-image-models#2438"
SYMPTOM = "Patches of opposite edges share a window and see one another."
NEEDS = ("window", "shift", "edge", "mask")

SIDE, WINDOW, SHIFT = 8, 4, 2


def cut(x):
    """[B, SIDE, SIDE, …] → [B · windows, WINDOW², …]."""
    count = SIDE // WINDOW
    return x.unflatten(2, (count, WINDOW)).unflatten(1, (count, WINDOW)).transpose(2, 3).flatten(0, 2).flatten(1, 2)


def join(x, batch):
    count = SIDE // WINDOW
    x = x.unflatten(1, (WINDOW, WINDOW)).unflatten(0, (batch, count, count)).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)


class Windows(nn.Module):
    """A layer of attention in windows; a bug overrides one of its methods."""

    def __init__(self, shift, masked):
        super().__init__()
        self.window_size = WINDOW
        self.shift, self.norm = shift, nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        edge = (torch.arange(SIDE) >= SIDE - shift).long() if shift else torch.zeros(SIDE, dtype=torch.long)
        region = cut((2 * edge[:, None] + edge)[None, ..., None])[..., 0]
        self.hidden = (region[:, None] != region[:, :, None])[:, None] if masked and shift else None

    def cut(self, x):
        return cut(x.roll((-self.shift, -self.shift), (1, 2)))

    def join(self, y, batch):
        return join(y, batch).roll((self.shift, self.shift), (1, 2))

    def forward(self, x):
        y = self.cut(self.norm(x))
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden.repeat(len(x), 1, 1, 1), float("-inf"))
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.join(y, len(x))


class Swin(nn.Module):
    def __init__(self, masked, layer=Windows):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.Sequential(layer(0, masked), layer(SHIFT, masked))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixel_values):
        return self.head(self.layers(self.patches(pixel_values).permute(0, 2, 3, 1)).mean((1, 2)))


def make_swin(masked, layer=Windows):
    generator = torch.Generator().manual_seed(0)
    batches = [{"pixel_values": torch.randn(4, 3, 32, 32, generator=generator)} for _ in range(2)]
    return build(lambda: Swin(masked, layer)), batches, {}


def make():
    return make_swin(False)


def sound():
    return make_swin(True)
