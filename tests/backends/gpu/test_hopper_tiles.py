"""The tiles of the Hopper forward: every supported call fits shared memory, and panels cover a head's columns."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from attention_data import make

from regard._backends.gpu.attention.hopper import launch as hopper

WIDTHS = [(d, e) for d in range(8, 257, 8) for e in {8, 64, 72, 128, d} if -(-e // 64) <= -(-d // 64)]


@pytest.mark.parametrize("stats", [("entropy",), ()], ids=["statistics", "plain"])
def test_tiles_fit_shared_memory(stats):
    for d, e in WIDTHS:
        p = make(0, b=1, h=1, g=1, m=64, n=64, d=d, e=e, dtype=torch.bfloat16, stats=stats)
        keys, splits, groups, stages, _ = hopper.choose_tiles(p)
        assert hopper.shared_bytes(p, keys, stages, groups * hopper.ROWS) <= hopper.SHARED_MEMORY, (d, e)
        assert stages >= 2 and keys % splits == 0, (d, e)


def test_panels_cover_the_columns():
    for d, e in WIDTHS:
        panels = hopper.choose_panels(d, e)
        assert (panels.PANELS - 1) * panels.PANEL + panels.LAST >= d > (panels.PANELS - 1) * panels.PANEL, (d, e)
        assert panels.E >= e > panels.E // 2 or panels.E == 64, (d, e)
        assert e <= panels.O_PANELS * panels.PANEL and panels.O_PANELS <= panels.PANELS, (d, e)


def test_blocks_of_two_warpgroups_where_three_waste_rows():
    assert [n for n in (64, 128, 192, 197, 300, 512, 1000, 4096) if hopper.wastes_rows(n)] == [64, 128, 197]
