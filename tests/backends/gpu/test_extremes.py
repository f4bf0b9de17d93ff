"""Row kernels on scores of any size a float has, against the float64 reference: interpreted here, real on a GPU."""

import math

import pytest
import torch
from row_plans import force_cut
from rows_data import FUSED

from regard import normalizers

pytest.importorskip("triton")

from regard._backends.gpu.rows import launch as rows
from regard._backends.gpu.rows.plan import Cut

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
SEVERAL = 128 if INTERPRETED else 8  # rows of a program
SIZES = (1e-40, 1e-38, 1e-30, 1e-20, 1e-10, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e6, 1e9, 1e11, 1e20, 1e30, 3.4e38)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow, inside the interpreter


def _scores(sizes, dtype):
    """Six rows of each size: mixed signs, all positive, all negative, two values, few seen, all equal."""
    kinds = torch.randn(6, 37, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-3, 3) / 3
    kinds[1] = kinds[1].abs()
    kinds[2] = -kinds[2].abs() - 0.01
    kinds[3] = torch.where(kinds[3] > 0.5, 1.0, -1.0)
    kinds[4, 5:] = -math.inf
    kinds[5] = 1.0
    scores = torch.cat([kinds * size for size in sizes])
    lowest = torch.finfo(dtype).min
    return scores.clamp(lowest, -lowest).where(scores > -math.inf, scores).to(dtype)


def _far(x, truth, floor, factor):
    """Where x is off its float64 truth by more than `factor` roundings of the row's size."""
    eps, most = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).max
    truth = truth.double()
    told = truth.abs() < most / 8  # beyond, the gradient itself is no float
    size = truth.abs().where(told, 0.0).amax(-1, keepdim=True) + floor + torch.finfo(x.dtype).smallest_normal
    return ((x.double() - truth).abs() > factor * eps * size) & told | (x.isnan() & told)


def _sizes(name, dtype):
    if dtype == torch.float32:
        least = 1e-37 if name in ("softpick", "relu") else 0.0  # 1/Z overflows
    else:
        least = 1e-3 if name == "softpick" else 1e-37  # exp(s) − 1 in float32; the interpreter's 16-bit subnormals
    most = 1e30 if name == "relu" else math.inf  # its sum overflows
    return [size for size in SIZES if least <= size <= most]


def _check(choice, s, scale, cut, monkeypatch):
    dp = torch.randn(s.shape, generator=torch.Generator().manual_seed(1)).to(s.dtype).to(DEVICE)
    wide = s.double().requires_grad_()
    exact = choice.reference(wide * scale, None, choice.theta)
    gradient = torch.autograd.grad(exact, wide, dp.double())[0]
    top = s.double().abs().where(s.isfinite(), 0.0).amax(-1, keepdim=True)
    slope = dp.double().abs().amax(-1, keepdim=True) * exact.detach().amax(-1, keepdim=True)
    slope = slope * torch.maximum(torch.tensor(scale, dtype=torch.float64, device=DEVICE), 1 / top)

    force_cut(monkeypatch, cut)
    p, state = rows.forward(s, choice, scale=scale)
    ds = rows.backward(dp, p if choice.slope_of_weight is not None else s, state, choice, scale=scale)
    assert not _far(p, exact.detach(), 0.0, 32).any()
    if choice.family != "threshold":  # their slopes near the edge of the support are as steep as τ's last bit
        assert not (_far(ds, gradient, slope, 64) & (slope < 1e36)).any()  # beyond, 1/Z overflows


@pytest.mark.drawn(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_scores_of_any_size(name, dtype, monkeypatch):
    choice, s = normalizers.get(name), _scores(_sizes(name, dtype), dtype).to(DEVICE)
    slow = choice.family == "threshold" and INTERPRETED
    if slow and (dtype == torch.bfloat16 or name == "entmax"):
        pytest.skip("slow to interpret: on a GPU")
    for scale in (0.3,) if slow else (0.3, 7.0):
        _check(choice, s, scale, Cut(64, 1, rows=SEVERAL, lanes=16), monkeypatch)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in FUSED if normalizers.get(name).family == "ratio"])
def test_rows_that_are_cut(name, dtype, monkeypatch):
    sizes = [size for size in _sizes(name, dtype) if size in (1e-38, 1e11, 3.4e38)]
    s = _scores(sizes, dtype).unflatten(0, (-1, 6))
    s = s[:, [0, 3, 4]] if INTERPRETED else s
    _check(normalizers.get(name), s.flatten(0, 1).to(DEVICE), 0.01, Cut(16, 1, parts=3), monkeypatch)
