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


def test_rows_of_few_keys_take_one_warpgroup():
    """Two programs share an SM, so that each may take half of its shared memory and registers."""
    for d in (64, 80, 128):
        for n, stats, groups in ((1024, (), 1), (1024, ("entropy",), 1), (4096, ("entropy",), 2)):
            p = make(0, b=1, h=1, g=1, m=64, n=n, d=d, e=d, dtype=torch.bfloat16, stats=stats)
            keys, _, found, stages, registers = hopper.choose_tiles(p)
            assert found == groups, (d, n)
            if found == 1:
                assert hopper.shared_bytes(p, keys, stages, 2 * hopper.ROWS) <= 113 * 1024 and registers == 232


def test_panels_cover_the_columns():
    for d, e in WIDTHS:
        panels = hopper.choose_panels(d, e)
        assert (panels.PANELS - 1) * panels.PANEL + panels.LAST >= d > (panels.PANELS - 1) * panels.PANEL, (d, e)
        assert panels.E >= e > panels.E // 2 or panels.E == 64, (d, e)
        assert e <= panels.O_PANELS * panels.PANEL and panels.O_PANELS <= panels.PANELS, (d, e)


def test_blocks_of_two_warpgroups_where_three_waste_rows():
    assert [n for n in (64, 128, 192, 197, 300, 512, 1000, 4096) if hopper.wastes_rows(n)] == [64, 128, 197]
