"""entmax_α(s) = argmax_{p ∈ Δ} p·s + H_α(p), solved by p_i = max((α−1)·s_i − τ, 0)^{1/(α−1)} with τ such that Σp = 1.

α = 1 is softmax, α = 2 sparsemax; the larger α, the sparser. Fused kernels take α up to 2, in attention from 1.005 on;
the reference computes the rest of 1 ≤ α ≤ 32, because above 2 Newton steps may overshoot. Below 1.1 rows are computed
in float64.

>>> import regard, torch
>>> regard.entmax(torch.tensor([-2.0, 0.0, 0.5]), alpha=1.5)
tensor([0.0000, 0.3260, 0.6740])
"""

import math

import torch

from regard.normalizers import softmax
from regard.normalizers._families import Threshold
from regard.normalizers._language import jit, tl
from regard.normalizers._record import Parameter

NEAR = 1.1  # below it 1/(α−1) magnifies float32's rounding too much, and the reference has another form
SERIES = 20  # terms of log(1 + w) / w, for |w| < 0.1
SMALLEST = 1e-75  # t of the smallest weight, as its slopes are told: their powers must not overflow


def solve(scores, visible, alpha):
    """p = max((α−1)·s − τ, 0)^{1/(α−1)}: bisection, then Newton steps that only autograd sees.

    t = (α−1)·s − τ is told from the lowest score that has weight: from the largest one it would cancel, and for a large
    α the root magnifies what is left. That score's t, or for α > 2 its weight, lies in (0, 1] and fixes τ. Each
    differentiable Newton step doubles the orders that are right: three give τ its first seven derivatives.
    """
    if scores.shape[-1] == 0:
        return scores * 1.0
    seen = scores > float("-inf") if visible is None else visible & (scores > float("-inf"))
    seen = seen | (scores.isnan() if visible is None else scores.isnan() & visible)
    empty = ~seen.any(-1, keepdim=True)
    gain = alpha - 1.0
    steep = gain.clamp_min(1.0) if isinstance(gain, torch.Tensor) else max(gain, 1.0)
    place = _lowest(scores.detach().masked_fill(~seen, float("-inf")), gain)
    s = scores.masked_fill(~seen, 0.0)
    x = _above(s, place, gain).masked_fill(~seen | (s < s.gather(-1, place)), float("-inf"))

    with torch.no_grad():
        low, high = torch.zeros_like(x[..., :1]), torch.ones_like(x[..., :1])
        for _ in range(60):
            middle = (low + high) / 2
            above = _root(x + middle**steep, gain).sum(-1, keepdim=True) >= 1.0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        value = _root(x + high**steep, gain).detach()  # no_grad does not stop a tangent that rides on α
        found = -(high**steep).clamp_min(SMALLEST).detach()
        inside = (x > found) & (value > 0)
    tau = found
    for _ in range(3):
        t = torch.where(inside, x - tau, 1.0)
        total = torch.where(inside, t ** (1.0 / gain), 0.0).sum(-1, keepdim=True)
        excess = total - total.detach()  # 0: what rounding, or SMALLEST, leaves of it would ride on the slopes
        fall = torch.where(inside, t ** (1.0 / gain - 1.0), 0.0).sum(-1, keepdim=True) / gain
        step = excess / fall.masked_fill(empty, 1.0)
        tau = found + (step - step.detach()) + (tau - tau.detach())
    p = torch.where(inside, torch.where(inside, x - tau, 1.0) ** (1.0 / gain), 0.0)
    total = value.sum(-1, keepdim=True).masked_fill(empty, 1.0)  # 1 but for rounding
    nan = scores.isnan().any(-1, keepdim=True) | (scores == float("inf")).any(-1, keepdim=True)
    return ((value + (p - p.detach())) / total).masked_fill(nan, float("nan"))


def _above(s, place, gain):
    """(α−1)·(s − lowest). Beyond α = 2 the lowest has the largest slope, which would cancel: there it moves along."""
    lowest = s.gather(-1, place)
    still = gain * (s - lowest.detach())
    moving = (gain * (s - lowest)).scatter(-1, place, 0.0)
    if isinstance(gain, torch.Tensor):
        return torch.where(gain > 1.0, moving, still)
    return moving if gain > 1.0 else still


def _root(t, gain):
    """max(t, 0)^{1/(α−1)}."""
    positive = t > 0
    return torch.where(positive, t.where(positive, 1.0) ** (1.0 / gain), 0.0)


@torch.no_grad()
def _lowest(scores, gain):
    """Where the lowest score s_j with weight stands, (…, 1): those above it, with τ = (α−1)·s_j, sum to less than 1."""
    ordered, places = scores.sort(-1, descending=True)
    low = torch.zeros_like(places[..., :1])  # one that has weight, and one below it that has none
    high = torch.full_like(low, scores.shape[-1])
    for _ in range(scores.shape[-1].bit_length()):
        middle = (low + high) // 2
        weighs = _root(gain * (ordered - ordered.gather(-1, middle)), gain).sum(-1, keepdim=True) < 1.0
        low, high = torch.where(weighs, middle, low), torch.where(weighs, high, middle)
    return places.gather(-1, low)


def solve_near_softmax(scores, visible, alpha):
    """entmax_α for 1 ≤ α ≤ 1.1 (a number, or a tensor of size 1 in the last dimension): p_i = exp(log(1 + k·u_i) / k).

    k = α − 1, u_i = s_i − c and c such that Σp = 1: the same weights as `solve`, where 1/k magnifies the rounding of τ
    without bound. Here k = 0 is a value like any other, p = exp(u), and every derivative in k exists there.
    """
    if scores.shape[-1] == 0:
        return scores * 1.0
    s, seen, bad, k = _prepare_near(scores, visible, alpha)
    empty = ~seen.any(-1, keepdim=True)
    c = found = _solve_constant(s.detach(), seen, k.detach())
    for _ in range(3):  # each step doubles the orders of derivatives that c has right; the value stays
        p, fall = _weigh_near(s - c, seen, k, _log1p_ratio)
        step = (p.sum(-1, keepdim=True) - 1.0) / fall.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        c = found + (step - step.detach()) + (c - c.detach())
    return _weigh_near(s - c, seen, k, _log1p_ratio)[0].masked_fill(bad, math.nan)


def _prepare_near(scores, visible, alpha):
    """Scores below their maximum, which of them count, which rows are lost to a NaN or +inf, and k."""
    bad = scores.isnan() | (scores == math.inf)
    bad = bad if visible is None else bad & visible
    seen = (scores > -math.inf) & ~bad if visible is None else visible & (scores > -math.inf) & ~bad
    k = torch.as_tensor(alpha - 1.0, dtype=scores.dtype, device=scores.device)
    top = scores.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    s = scores.masked_fill(~seen, 0.0) - top.masked_fill(top == -math.inf, 0.0)
    return s, seen, bad.any(-1, keepdim=True), k


def _solve_constant(s, seen, k):
    """c by Newton's steps on log Σp, which is linear in c at k = 0, from above: c ≤ log Σ exp(s), (1 − n⁻ᵏ)/k."""
    with torch.no_grad():
        n = math.log(s.shape[-1])
        highest = torch.where(k > 0, -torch.expm1(-k * n) / k.where(k > 0, 1.0), n)
        c = torch.logsumexp(s.masked_fill(~seen, -math.inf), -1, keepdim=True).clamp_min(0.0)
        c = torch.minimum(c, highest)
        for _ in range(8):
            p, fall = _weigh_near(s - c, seen, k, _log1p_quotient)
            total = p.sum(-1, keepdim=True).clamp_min(1e-300)
            c = c + torch.log(total) * total / fall.sum(-1, keepdim=True).clamp_min(1e-300)
            c = torch.minimum(c.clamp_min(0.0), highest)
        return c.detach()


def _weigh_near(u, seen, k, ratio):
    """(p, −∂p/∂c) = (exp(log(1 + k·u)/k), p / (1 + k·u)), 0 where k·u ≤ −1."""
    w = k * u
    inside = seen & (w > -1.0)
    w, u = w.where(inside, 0.0), u.where(inside, 0.0)
    p = torch.exp(u * ratio(w)).where(inside, 0.0)
    return p, p / (1.0 + w)


def _log1p_ratio(w):
    """log(1 + w) / w, smooth at 0."""
    near = w.abs() < 0.1
    small, large = w.where(near, 0.0), w.where(~near, 1.0)
    series = torch.zeros_like(w)
    for n in range(SERIES, 0, -1):
        series = 1.0 / n - small * series
    return torch.where(near, series, torch.log1p(large) / large)


def _log1p_quotient(w):
    """log1p(x)/x without derivatives at 0."""
    zero = w == 0
    return torch.where(zero, 1.0, torch.log1p(w) / w.masked_fill(zero, 1.0))


def reference(scores, visible, theta):
    if not isinstance(theta, torch.Tensor):
        if theta == 1.0:
            return softmax.reference(scores, visible, None)
        return (solve_near_softmax if theta < NEAR else solve)(scores, visible, theta)
    alpha = theta.to(scores.dtype)
    near = alpha < NEAR
    far = solve(scores, visible, alpha.where(~near, 1.5))
    return torch.where(near, solve_near_softmax(scores, visible, alpha.where(near, 1.0)), far)


def parameter_vjp(p, dp, alpha):
    """Σ_i dp_i·∂p_i/∂α with ∂p/∂α = r·Σq − q, r = p^{2−α} / Σ p^{2−α}, q = p·log² p·(eˣ − 1 − x)/x², x = −(α−1)·log p.

    Correia et al. 2019 (arXiv 1909.00015), rearranged: nothing is divided by α − 1, and at α = 1 the factor is 1/2.
    """
    seen = p > 0
    log = torch.log(p.where(seen, 1.0))
    k = alpha - 1.0
    x = -k * log
    raw = torch.where(seen, torch.exp((1.0 - k) * log), 0.0)
    small = x.abs() < 0.5
    series = torch.zeros_like(p)
    for n in range(15, 1, -1):  # Σ xⁿ⁻² / n!
        series = (1.0 + series * x.where(small, 0.0)) / n
    q = torch.where(small, p * log**2 * series, (raw - p - p * x) / k.where(k > 0, 1.0) ** 2)
    share = raw / raw.sum(-1, keepdim=True).clamp_min(1e-30)
    return (dp * (share * q.sum(-1, keepdim=True) - q)).sum(-1)


@jit
def gain(alpha):
    return alpha - 1.0


@jit
def power(t, exponent):
    return tl.where(t > 0.0, tl.exp2(exponent * tl.log2(tl.maximum(t, 1e-37))), 0.0)


@jit
def value(t, alpha):
    return power(t, 1.0 / (alpha - 1.0))


@jit
def slope(t, alpha):
    return power(t, (2.0 - alpha) / (alpha - 1.0))


@jit
def slope_of_weight(p, alpha):
    return power(p, 2.0 - alpha)


@jit
def parameter_slope(p, alpha):
    """−p·log² p·(eˣ − 1 − x)/x², x = −(α−1)·log p: `parameter_vjp`'s −q, as a tile function."""
    k = alpha - 1.0
    log = tl.log(tl.maximum(p, 1e-37))
    x = -k * log
    near = tl.minimum(x, 0.25)
    series = 1.0 / 40320.0 + near * (1.0 / 362880.0)
    series = 1.0 / 5040.0 + near * series
    series = 1.0 / 720.0 + near * series
    series = 1.0 / 120.0 + near * series
    series = 1.0 / 24.0 + near * series
    series = 1.0 / 6.0 + near * series
    series = 0.5 + near * series
    far = p * (tl.exp(x) - 1.0 - x) * (1.0 / (k * k))  # a quotient of rows alone
    return tl.where(p > 0.0, -tl.where(x < 0.25, p * log * log * series, far), 0.0)


normalizer = Threshold(
    name="entmax",
    formula="max((α−1)·s − τ, 0)^(1/(α−1)), Σ = 1",
    sums_to="1",
    sparse=True,
    use_when="exact zeros; α 1.25 costs least",
    paper="Peters, Niculae & Martins 2019, arXiv 1905.05702",
    reference=reference,
    parameter=Parameter(
        "alpha", default=1.5, low=1.0, high=32.0, fused_low=1.005, fused_high=2.0, wide_below=NEAR, softmax_at=1.0
    ),
    parameter_vjp=parameter_vjp,
    parameter_slope=parameter_slope,
    gain=gain,
    value=value,
    slope=slope,
    slope_of_weight=slope_of_weight,
)
