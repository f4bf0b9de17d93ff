"""Long float32 softmax rows by `forward_fast_exact`: interpreted here, real on a GPU."""

import math

import pytest
import torch
from row_plans import force_cut

from regard import normalizers

pytest.importorskip("triton")

from regard._backends.gpu.rows import launch as rows
from regard._backends.gpu.rows.plan import Cut

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUT = Cut(512, 1, step=128, lanes=32)
UNITS = 0.7  # in the last place: its own rounding, and what the terms of Z lose in rows as short as these
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow, inside the interpreter


@pytest.fixture(autouse=True)
def _fast_exact(monkeypatch):
    force_cut(monkeypatch, CUT)


def _rows(n):
    """Flat, ordinary, sharp; far from 0; half hidden; one score above all; one visible; none visible; huge."""
    s = torch.randn(9, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    s *= torch.tensor([0.05, 0.5, 20.0, 0.3, 0.5, 0.5, 0.0, 0.0, 1e30])[:, None]
    s[3] += 40.0
    s[4, ::2] = -math.inf
    s[5, 7] = 30.0
    s[6, 1:] = -math.inf
    s[7] = -math.inf
    return s.float().to(DEVICE)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_weights_are_near_the_nearest_float(name, scale):
    choice = normalizers.get(name)
    for n in (512, 400) if DEVICE == "cuda" else (400,):
        s = _rows(n)
        p, state = rows.forward(s, choice, scale=scale)
        exact = choice.reference(s.double() * scale, None, None)
        unit = torch.exp2(torch.floor(torch.log2(exact.clamp_min(1e-300))) - 23)
        assert ((p.double() - exact).abs() <= UNITS * unit)[exact > 1e-33].all()
        assert (p[s == -math.inf] == 0).all() and (p[exact < 1e-46] == 0).all()
        shift = s.amax(-1) if name == "softmax" else s.amax(-1).clamp_min(0.0)
        shift = shift.where(shift > -math.inf, 0.0)
        z = torch.exp((s.double() - shift.double()[:, None]) * scale).sum(-1)
        if name == "softmax1":
            z = torch.where(s.amax(-1) > -math.inf, z + torch.exp(-shift.double() * scale), 0.0)
        assert torch.equal(state[0], shift)
        assert torch.allclose(state[1].double(), z, rtol=1e-6, atol=0)


def test_rows_that_become_nan_are_alone():
    s = _rows(400)
    s[0, 3], s[1, 5], s[3, 7] = math.nan, math.inf, math.nan
    mask = torch.rand(9, 400, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.8
    mask[0, 3] = mask[1, 5] = True
    mask[3, 7] = False
    choice = normalizers.get("softmax")
    p, _ = rows.forward(s, choice, mask=mask)
    exact = choice.reference(s.double(), mask, None)
    assert p[:2].isnan().all() and (p[~mask][~p[~mask].isnan()] == 0).all()
    assert ((p[2:].double() - exact[2:]).abs() <= 4e-7 * exact[2:].amax(-1, keepdim=True)).all()
