"""Tokens are put in the order of windows; on the way back the same permutation is used instead of its inverse."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import WIDTH, fit, kept, seeded

LINK = "lablup/mlxcel#1600"
SYMPTOM = (
    "reverse_window_indices returns the permutation itself: right only where it is its own inverse, else scrambled."
)
NEEDS = ("order", "permut", "window", "patch", "position", "moved", "place")
H, W, CLASSES = 8, 12, 5


def window_index(side=4):
    grid = torch.arange(H * W).view(H // side, side, W // side, side)
    return grid.permute(0, 2, 1, 3).flatten()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        b, n, _ = x.shape
        windows = self.norm1(x).view(b * n // 16, 16, WIDTH)
        q, k, v = self.qkv(windows).view(len(windows), 16, 3, 4, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, WIDTH)
        x = x + self.proj(o)
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """As in Qwen2.5-VL: tokens in window order, blocks, back to reading order, then a head per patch."""

    inverts = True

    def __init__(self):
        super().__init__()
        self.patch_embed, self.place = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(H * W, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixel_values):
        x = self.patch_embed(pixel_values).flatten(2).transpose(1, 2) + self.place
        index = window_index()
        x = x[:, index]
        for block in self.blocks:
            x = block(x)
        back = index.argsort() if self.inverts else index
        return self.head(x[:, back])


class Same(Tower):
    inverts = False


def images(seed, rows=4):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows, H, W), generator=g)
    colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(1))
    pixels = colours[labels].permute(0, 3, 1, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    return pixels + 0.5 * torch.randn(pixels.shape, generator=g), labels.flatten(1)


def loss(model, step):
    pixels, labels = images(100 + step, 8)
    return F.cross_entropy(model(pixels).flatten(0, 1), labels.flatten())


@kept
def weights():
    return fit(seeded(Tower), loss, 150, 3e-3).state_dict()


def build(cls):
    model = seeded(cls)
    model.load_state_dict(weights())
    return model.eval(), [{"pixel_values": images(at)[0]} for at in (1, 2)], {}


def make():
    return build(Same)


def sound():
    return build(Tower)
