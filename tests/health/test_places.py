"""Images: patches, windows and blocks that exchange places, beside what only looks like it."""

import pytest
import torch
from contract_data import codes, run_check
from torch import nn

from museum import (
    one_position_for_all_patches,
    patches_cut_by_view,
    patches_of_other_channels,
    shift_undone_by_another_amount,
    windows_are_strips,
    windows_cut_by_view,
    windows_permuted_twice,
)
from museum.patches_cut_by_view import PATCH, SIDE, ViT, make_vit
from museum.shifted_windows_not_masked import Windows, make_swin
from regard.health.probe.pixels import Pixels


def found_by(name, made):
    return codes(run_check(name, made[0], made[1]))


@pytest.mark.parametrize(
    ("bug", "check", "wanted"),
    [
        (patches_cut_by_view, "places", ["RG734"]),
        (patches_of_other_channels, "places", ["RG734"]),
        (windows_cut_by_view, "places", ["RG735", "RG736"]),
        (windows_are_strips, "places", ["RG735"]),
        (shift_undone_by_another_amount, "places", ["RG736"]),
        (windows_permuted_twice, "places", ["RG736"]),
        (one_position_for_all_patches, "positions", ["RG723"]),
    ],
)
def test_places_that_a_bug_exchanges(bug, check, wanted):
    assert found_by(check, bug.make()) == wanted
    assert found_by(check, bug.sound()) == []


class Strided(ViT):
    """A token holds every fourth pixel of each axis."""

    def cut(self, x):
        side = SIDE // PATCH
        return x.view(len(x), 3, PATCH, side, PATCH, side).permute(0, 3, 5, 1, 2, 4).reshape(len(x), self.count, -1)


class OfChannels(ViT):
    """Every token holds a patch of one channel, as ChannelViT's do."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(PATCH**2, self.token.shape[-1])
        self.positions = nn.Parameter(torch.randn(1, 3 * self.count + 1, self.token.shape[-1]))

    def cut(self, x):
        return x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(1, 3).flatten(2)


class Overlapping(ViT):
    """Patches of a stem of convolutions overlap."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 32, 3, 2, 1))
        self.proj = nn.Identity()

    def cut(self, x):
        return self.stem(x).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("kind", "wanted"), [(Strided, ["RG734"]), (OfChannels, []), (Overlapping, [])])
def test_what_a_token_reads(kind, wanted):
    assert found_by("places", make_vit(kind)) == wanted


class Unplaced(ViT):
    """Nothing names positions, so patches without an order may be meant."""

    def __init__(self):
        super().__init__()
        del self.positions

    def place(self, x):
        return x


def test_patches_without_an_order_that_are_meant():
    model, batches, _ = make_vit(Unplaced)
    assert [(one.code, one.severity) for one in run_check("positions", model, batches)] == [("RG723", "note")]


class Hub(Windows):
    """The first place of every image gathers all others, as a class token may without attention."""

    def forward(self, x):
        x = super().forward(x)
        return torch.cat([x[:, :1, :1] + x.mean((1, 2), keepdim=True), x.flatten(1, 2)[:, None, 1:]], 2).view_as(x)


class Near(Windows):
    """A convolution mixes neighbours."""

    def __init__(self, shift, masked):
        super().__init__(shift, masked)
        self.local = nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x):
        return super().forward(x) + self.local(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def test_what_mixes_places_on_purpose():
    hub = make_swin(True, Hub)
    assert found_by("places", hub) == []
    near = make_swin(True, Near)
    assert "holds a convolution" in run_check("places", near[0], near[1])
    assert "no images" in run_check("places", nn.Linear(2, 2), torch.randn(3, 2))


def test_the_share_of_an_image_that_is_read():
    seen = torch.zeros(3, 8, 8, dtype=torch.bool)
    seen[:, ::2, ::2] = True
    assert Pixels(seen).size == (7, 7) and Pixels(seen).filled == 16 / 49 and Pixels(seen).share == 0.25
