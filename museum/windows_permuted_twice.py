"""Patches are sorted by windows, and sorted back with the same index in place of its inverse."""

import torch

from museum.patches_cut_by_view import ViT, make_vit

LINK = "lablup/mlxcel#1603"
SYMPTOM = "Right where the permutation is its own inverse, as of one window; else image features are in a wrong order."
NEEDS = ("permut", "other place")

SIDE, WINDOW = 4, 2


def sort_by_window():
    """Indices of patches, window after window."""
    grid = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    return grid.unflatten(1, (-1, WINDOW)).unflatten(0, (-1, WINDOW)).permute(2, 0, 1, 3).flatten()


class Encoder(torch.nn.Module):
    """Two layers that see windows, each sorting the patches there and back."""

    def __init__(self, layers, inverse):
        super().__init__()
        self.layers, self.inverse = layers, inverse

    def forward(self, x):
        index = sort_by_window()
        back = index.argsort() if self.inverse else index
        y = x[:, 1:][:, index].unflatten(1, (-1, WINDOW * WINDOW)).flatten(0, 1)
        for layer in self.layers:
            y = layer(y)
        return torch.cat([x[:, :1], y.view(len(x), -1, y.shape[-1])[:, back]], 1)


class Windowed(ViT):
    inverse = True

    def __init__(self):
        super().__init__()
        self.encoder = Encoder(self.encoder.layers, self.inverse)

    def pool(self, x):
        return (x * torch.linspace(0, 1, x.shape[1])[:, None]).mean(1)


class Twice(Windowed):
    inverse = False


def make():
    return make_vit(Twice)


def sound():
    return make_vit(Windowed)
