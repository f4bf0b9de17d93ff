"""entmax15(s)_i = max(s_i/2 − τ, 0)² with τ such that Σ = 1: halfway between softmax and sparsemax.

>>> import regard, torch
>>> regard.entmax15(torch.tensor([-2.0, 0.0, 0.5]))
tensor([0.0000, 0.3260, 0.6740])
"""

from regard.normalizers import entmax
from regard.normalizers._families import Threshold
from regard.normalizers._language import jit, tl


def reference(scores, visible, theta):
    return entmax.solve(scores, visible, 1.5)


@jit
def gain(alpha):
    return 0.5


@jit
def value(t, alpha):
    return t * t


@jit
def slope(t, alpha):
    return t


@jit
def slope_of_weight(p, alpha):
    return tl.sqrt(p)


normalizer = Threshold(
    name="entmax15",
    formula="max(s/2 − τ, 0)², Σ = 1",
    sums_to="1",
    sparse=True,
    use_when="exact zeros; with asentmax, texts longer than trained",
    paper="Peters, Niculae & Martins 2019, arXiv 1905.05702",
    reference=reference,
    gain=gain,
    value=value,
    slope=slope,
    slope_of_weight=slope_of_weight,
    order=2,
)
