"""`x.view(B, num_patches, -1)` cuts an image into runs of pixels in memory order, not into square patches."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import WIDTH, fit, kept, seeded

LINK = "duoan/TorchCode#21"
SYMPTOM = "A ViT's patch embedding views [B, C, H, W] without a permute; the tests pass, the accuracy is lower."
NEEDS = ("patch", "image", "pixel", "grid", "view", "reshape")
SIDE, P = 16, 4


class PatchEmbedding(nn.Module):
    permutes = True

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3 * P * P, WIDTH)

    def forward(self, x):
        b, c, h, w = x.shape
        if self.permutes:
            x = x.reshape(b, c, h // P, P, w // P, P).permute(0, 2, 4, 1, 3, 5)
        return self.proj(x.reshape(b, (h // P) * (w // P), -1))


class Viewed(PatchEmbedding):
    permutes = False


class ViT(nn.Module):
    def __init__(self, embedding=PatchEmbedding):
        super().__init__()
        self.patches, self.cls = embedding(), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, pixel_values):
        x = self.patches(pixel_values)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def images(seed, rows=8):
    """Class: the direction (of 4) of a stripe pattern that stands in two random patches of noise."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (rows,), generator=g)
    y, x = torch.meshgrid(torch.arange(P), torch.arange(P), indexing="ij")
    stripes = torch.stack([(y % 2), (x % 2), ((x + y) % 2), ((x - y) % 4 < 2)]).float() * 2 - 1
    pixels = torch.randn(rows, 3, SIDE, SIDE, generator=g) * 0.5
    for row in range(rows):
        for _ in range(2):
            a, b = (torch.randint(4, (2,), generator=g) * P).tolist()
            pixels[row, :, a : a + P, b : b + P] += stripes[labels[row]]
    return pixels, labels


def loss(model, step):
    pixels, labels = images(100 + step, 32)
    return F.cross_entropy(model(pixels), labels)


@kept
def good_weights():
    return fit(seeded(ViT), loss, 300, 2e-3).state_dict()


@kept
def bad_weights():
    return fit(seeded(lambda: ViT(Viewed)), loss, 300, 2e-3).state_dict()


def build(embedding, weights):
    model = seeded(lambda: ViT(embedding))
    model.load_state_dict(weights())
    return model.eval(), [{"pixel_values": images(at, 4)[0]} for at in (1, 2)], {}


def make():
    return build(Viewed, bad_weights)


def sound():
    return build(PatchEmbedding, good_weights)
