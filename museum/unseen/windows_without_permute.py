"""window_partition only views: a "window" of 4 × 4 is 16 neighbours in reading order, two rows of the image."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import WIDTH, fit, kept, seeded

LINK = "ByChelsea/CMOS#4"
SYMPTOM = "The windows need to be permuted first and then viewed; the feature map is misaligned."
NEEDS = ("window", "image", "pixel", "grid", "patch", "neighbour")
SIDE, WINDOW, CLASSES = 8, 4, 6


class WindowAttention(nn.Module):
    permutes = True

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def partition(self, x):
        b, h, w, c = x.shape
        if not self.permutes:
            return x.reshape(-1, WINDOW * WINDOW, c)
        x = x.view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, c)

    def reverse(self, x, b):
        if not self.permutes:
            return x.reshape(b, SIDE, SIDE, -1)
        n = SIDE // WINDOW
        return x.view(b, n, n, WINDOW, WINDOW, -1).permute(0, 1, 3, 2, 4, 5).reshape(b, SIDE, SIDE, -1)

    def forward(self, x):
        windows = self.partition(self.norm(x))
        q, k, v = self.qkv(windows).view(len(windows), WINDOW * WINDOW, 3, 4, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.reverse(self.proj(o), len(x))
        return x + self.mlp(self.norm2(x))


class Viewed(WindowAttention):
    permutes = False


class Segmenter(nn.Module):
    """Class of each pixel's object, from noisy pixels [B, 3, 8, 8]."""

    def __init__(self, attention=WindowAttention):
        super().__init__()
        self.stem, self.place = nn.Conv2d(3, WIDTH, 1), nn.Parameter(torch.randn(SIDE, SIDE, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixel_values):
        x = self.stem(pixel_values).permute(0, 2, 3, 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def images(seed, rows=8):
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(CLASSES, (rows, 2, 2), generator=g)
    colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(1))
    labels = kinds.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return colours[labels].permute(0, 3, 1, 2) + 1.5 * torch.randn(rows, 3, SIDE, SIDE, generator=g), labels


def loss(model, step):
    pixels, labels = images(100 + step, 16)
    return F.cross_entropy(model(pixels).flatten(0, 2), labels.flatten())


@kept
def good_weights():
    return fit(seeded(Segmenter), loss, 300, 3e-3).state_dict()


@kept
def bad_weights():
    return fit(seeded(lambda: Segmenter(Viewed)), loss, 300, 3e-3).state_dict()  # trained with the bug


def build(attention, weights):
    model = seeded(lambda: Segmenter(attention))
    model.load_state_dict(weights())
    return model.eval(), [{"pixel_values": images(at, 4)[0]} for at in (1, 2)], {}


def make():
    return build(Viewed, bad_weights)


def sound():
    return build(WindowAttention, good_weights)
