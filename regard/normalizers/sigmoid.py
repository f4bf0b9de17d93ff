"""sigmoid(s)_i = 1 / (1 + exp(−s_i − bias)): each key is weighed alone; rows need not sum to anything.

>>> import regard, torch
>>> regard.sigmoid_norm(torch.tensor([0.0, 2.0]))
tensor([0.5000, 0.8808])
"""

import torch

from regard.normalizers._families import Pointwise
from regard.normalizers._language import jit, tl
from regard.normalizers._record import Parameter


def reference(scores, visible, theta):
    p = torch.sigmoid(scores + theta)
    return p if visible is None else p.masked_fill(~visible, 0.0)


def parameter_vjp(p, dp, bias):
    """Σ_i dp_i·∂p_i/∂bias."""
    return (dp * p * (1.0 - p)).sum(-1)


@jit
def value(s, bias):
    return 1.0 / (1.0 + tl.exp(-s - bias))


@jit
def log_odds(power, bias):
    return bias * -1.4426950408889634 - power


@jit
def slope(s, bias):
    e = tl.exp(-tl.abs(s + bias))
    return e / ((1.0 + e) * (1.0 + e))


@jit
def slope_of_weight(p, bias):
    return p * (1.0 - p)


def minus_log(n):
    """−ln n of a row's n visible keys, which lets an untrained row sum to about 1; n = 0 counts as 1."""
    return -torch.log(n.clamp_min(1.0))


normalizer = Pointwise(
    name="sigmoid",
    formula="1 / (1 + exp(−s − bias))",
    sums_to="anything up to n",
    sparse=False,
    use_when="keys should not compete; 0.026 nats worse, bias learned",
    paper="Ramapuram et al. 2024, arXiv 2409.04431",
    reference=reference,
    parameter=Parameter(
        "bias", default=0.0, low=-1e4, high=1e4, by_keys={"-log(n)": minus_log}, learned_from="-log(n)"
    ),
    parameter_vjp=parameter_vjp,
    parameter_slope=slope_of_weight,
    value=value,
    slope=slope,
    slope_of_weight=slope_of_weight,
    log_odds=log_odds,
)
