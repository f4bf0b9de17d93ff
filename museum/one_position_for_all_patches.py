"""The table of positions is indexed by the number of patches, so that all patches get one and the same row."""

import torch
from torch import nn

from museum.parts import WIDTH
from museum.patches_cut_by_view import ViT, make_vit

LINK = "labmlai/annotated_deep_learning_paper_implementations#133"
SYMPTOM = "An image with its patches in another order has the same class."
NEEDS = ("position", "order")


class Table(ViT):
    one = True

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(64, WIDTH))

    def place(self, x):
        return x + (self.positions[x.shape[1]] if self.one else self.positions[: x.shape[1]])


class Sliced(Table):
    one = False


def make():
    return make_vit(Table)


def sound():
    return make_vit(Sliced)
