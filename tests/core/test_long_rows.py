"""Long rows: float32 softmax the quick way, threshold rows of which half is held; interpreted here, real on a GPU."""

import math

import pytest
import torch

from regard import normalizers

pytest.importorskip("triton")

from regard._backends.gpu.rows import launch as rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = rows.Plan(1, 512, 1, 1, False, step=128)
UNITS = 0.7  # in the last place: its own rounding, and what the terms of Z lose in rows as short as these
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow, inside the interpreter


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(rows, "plan", lambda *_: PLAN)
    monkeypatch.setattr(rows.torch, "empty_like", lambda x: empty_like(x).fill_(math.nan))


def _rows(n):
    """Flat, ordinary, sharp; far from 0; half hidden; one score above all; one seen; none seen; huge."""
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
    mask[3, 7] = False  # nobody sees that one
    choice = normalizers.get("softmax")
    p, _ = rows.forward(s, choice, mask=mask)
    exact = choice.reference(s.double(), mask, None)
    assert p[:2].isnan().all() and (p[~mask][~p[~mask].isnan()] == 0).all()
    assert ((p[2:].double() - exact[2:]).abs() <= 4e-7 * exact[2:].amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_threshold_rows_of_which_half_is_held(name, monkeypatch):
    monkeypatch.setattr(rows, "plan", lambda *_: rows.Plan(1, 1024, 1, 1, False, again=True))
    monkeypatch.setattr(rows.Plan, "rereads", lambda *_: "half")
    choice = normalizers.get(name)
    s = torch.randn(4, 900, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    s[1] *= 10.0
    s[2, :700] = -math.inf  # all of the half that is held
    s[3, 600:] = -math.inf
    p, _ = rows.forward(s, choice)
    exact = choice.reference(s.double(), None, choice.theta)
    assert ((p.double() - exact).abs() <= 1e-6 * exact.amax(-1, keepdim=True)).all()
    assert ((p.double().sum(-1) - 1).abs() <= 2e-6).all()
