"""`Terms`, what a key adds to a row's sums (u, v, u′ and their products), and the shift they are relative to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.normalizers._language import speak, torch_words


class Terms:
    """(u, v, u′, cross) of scores in a shift, from the normaliser's own tile functions spoken in torch."""

    def __init__(self, choice, theta=None):
        self.family, self.choice = choice.family, choice
        theta = choice.theta if theta is None else theta
        self.theta = 0.0 if theta is None else theta
        self.exponential = choice.softmax_family
        names = {
            "ratio": ("numerator", "denominator", "numerator_slope", "denominator_slope", "rest"),
            "threshold": ("gain", "value", "slope"),
            "pointwise": ("slope",),
        }[self.family]
        self.tile = {name: speak(getattr(choice, name), torch_words) for name in names}

    def __call__(self, s: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tile = self.tile
        if self.family == "ratio":
            return self.ratio(torch.exp(s - shift), s, torch.exp(-shift).expand(s.shape))
        if self.family == "threshold":
            return self.above((tile["gain"](self.theta) * s - shift).clamp_min(0.0))
        u = self.choice.reference(s, None, self.theta)  # its gradient is finite at any score
        return u, u, tile["slope"](s, self.theta).to(s.dtype), torch.zeros_like(u)

    def above(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(u, v, u′, cross) of a threshold map's t = gain·s − τ."""
        u, du = (self.tile[name](t, self.theta).to(t.dtype) for name in ("value", "slope"))
        return u, u, du, du * du

    def ratio(self, e: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(u, v, u′, cross) of a ratio's scores, with e = exp(s − m) and c = exp(−m)."""
        du, dv = (self.tile[name](e, s, c).to(s.dtype) for name in ("numerator_slope", "denominator_slope"))
        if self.choice.differs:  # e − c = (e^s − 1)·c, without cancellation near 0
            near = s.abs() < 1.0
            e, c = torch.where(near, torch.expm1(s.where(near, 0.0)) * c, e - c), torch.zeros_like(c)
        u, v = (self.tile[name](e, s, c).to(s.dtype) for name in ("numerator", "denominator"))
        return u, v, du, dv * u

    def weighs(self, s: Tensor, u: Tensor) -> Tensor:
        """True where u > 0 in exact arithmetic: of a ratio, where u rises, however small exp(s − m) is."""
        one = torch.ones_like(s)
        return (self.tile["numerator_slope"](one, s, one) if self.family == "ratio" else u) > 0

    def rest(self, shift: Tensor) -> Tensor:
        if self.family != "ratio":
            return torch.zeros_like(shift)
        limit = math.log(torch.finfo(shift.dtype).max)  # of a finite exponential: an infinite one has NaN gradients
        return self.tile["rest"](torch.exp((-shift).clamp_max(limit)))


def solve_shift(scores: Tensor, visible: Tensor, choice, theta=None) -> Tensor:
    """Solve the shift m (ratio) or τ (threshold) of rows, (…, 1).

    Threshold maps are solved in (α−1)·s. Pointwise maps need nothing (0).
    """
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    seen = scores.masked_fill(~visible, -math.inf)
    top = seen.amax(-1, keepdim=True)
    if choice.family == "ratio":
        if not choice.exponential and choice.shift != "max":
            top = top.clamp_min(0.0) if choice.shift == "max0" else torch.zeros_like(top)
        return top.masked_fill(top == -math.inf, 0.0)
    if choice.family == "pointwise":
        return torch.zeros_like(top)
    theta = choice.theta if theta is None else theta
    theta = 0.0 if theta is None else theta
    gain, value = speak(choice.gain, torch_words)(theta), speak(choice.value, torch_words)
    x = gain * seen
    high = x.amax(-1, keepdim=True)
    high = high.masked_fill(high == -math.inf, 0.0)
    low = high - 1.0
    for _ in range(60):
        middle = (low + high) / 2
        above = value((x - middle).clamp_min(0.0), theta).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return low
    low = low.detach()
    t = (x - low).clamp_min(0.0)  # a step of Newton's that only autograd sees: dτ = Σg′ds / Σg′
    fall = speak(choice.slope, torch_words)(t, theta).sum(-1, keepdim=True).detach() / gain
    step = value(t, theta).sum(-1, keepdim=True) / fall.masked_fill(fall == 0, 1.0)
    return low + (step - step.detach())
