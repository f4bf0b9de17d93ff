"""Sums over the keys of a row, the shift that they are relative to, and the statistics that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.normalizers._language import callees, plain, speak, torch_words
from regard.statistics.definitions import DEFINITIONS, Row


def _speak(function: Any) -> FunctionType:
    """A statistic in torch, with torch's own log1p, whose derivatives are exact."""
    body, called = plain(function), callees(function).items()
    own = {name: torch.log1p if name == "log1p" else _speak(x) for name, x in called}
    return FunctionType(body.__code__, {**body.__globals__, **own, "tl": torch_words}, body.__name__)


SPOKEN = {name: _speak(one.finish) for name, one in DEFINITIONS.items()}


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


@dataclass
class State:
    """Sums over the visible keys of a row, in the row's shift; each field has shape (…, 1).

    Sums marked ' leave out the keys at the row's maximal logit. `shift` is m or τ.
    """

    n: Tensor  # visible keys
    top: Tensor  # max s
    ties: Tensor  # how many keys have s = top
    mean: Tensor  # of s
    m2: Tensor  # Σ (s − mean)²
    shift: Tensor
    first: Tensor  # position of the first visible key, inf if none
    first_u: Tensor  # its u
    u: Tensor  # Σ' u
    v: Tensor  # Σ' v (ratio), else Σ' u
    log_u: Tensor  # Σ' u·log u
    square: Tensor  # Σ' u²
    slope: Tensor  # Σ' u′ (threshold: g′)
    cross: Tensor  # Σ' v′·u (threshold: g′²)
    lse: Tensor  # Σ' exp(s − top)
    distance: Tensor  # Σ u·|i − j|, the maximum included
    support: Tensor  # keys with u > 0, the maximum included

    @classmethod
    def of(cls, scores, visible, choice, shift, rows, theta=None) -> State:
        """The state of rows: scores (…, n), the rows' shift (…, 1), their positions `rows` (…, 1)."""
        terms = Terms(choice, theta)
        keys = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype).expand(scores.shape)
        hidden = scores.masked_fill(~visible, -math.inf)

        def total(x, where=visible):
            return torch.where(where, x, 0.0).sum(-1, keepdim=True)

        n = visible.sum(-1, keepdim=True).to(scores.dtype)
        none = n == 0
        top = hidden.amax(-1, keepdim=True) if scores.shape[-1] else torch.full_like(n, -math.inf)
        s = torch.where(visible, scores, top.detach().masked_fill(none, 0.0))  # hidden keys: finite in every term
        mean = total(s) / n.clamp_min(1)
        below = visible & (s < top)
        u, v, du, cross = terms(s, shift)
        seen_keys = keys.masked_fill(~visible, math.inf)
        first = seen_keys.amin(-1, keepdim=True) if scores.shape[-1] else torch.full_like(n, math.inf)
        return cls(
            n=n,
            top=top,
            ties=n - total(torch.ones_like(s), below),
            mean=mean,
            m2=total((s - mean) ** 2),
            shift=shift,
            first=first,
            first_u=total(u, visible & (keys == first)),
            u=total(u, below),
            v=total(v, below),
            log_u=total(_xlogx(u), below),
            square=total(u * u, below),
            slope=total(du, below),
            cross=total(cross, below),
            lse=total(torch.exp(s - top.masked_fill(none, 0.0)), below),
            distance=total(u * (rows - keys).abs()),
            support=total(terms.weighs(s, u).to(s.dtype) if choice.sparse else torch.ones_like(s)),
        )

    def finish(self, choice, sink: Tensor | None = None, theta=None) -> dict[str, Tensor]:
        """Every statistic of the table, each of shape (…), from the state of the row."""
        terms = Terms(choice, theta)
        none = self.n == 0
        top = torch.where(none, torch.zeros_like(self.top), self.top)
        u, v, du, cross = terms(top, self.shift)
        ties = self.ties
        alive = (u > 0) & ~none
        unit = torch.where(alive, u, torch.ones_like(u))
        at_max, lse = (u, v, du, cross), top + torch.log(ties + self.lse)
        inverse, gain, lse = self._sharpness(terms, choice, sink, none, at_max, lse)
        square = unit * unit  # which may underflow, as every square then does
        row = Row(
            n=self.n, top=top, mean=self.mean, m2=self.m2, ties=ties, u=unit,
            others=torch.where(alive, self.u / unit, 0.0), lower=(self.log_u - torch.log(unit) * self.u) / unit,
            squares=ties + self.square / square.masked_fill(square == 0, 1.0), far=self.distance, first=self.first_u,
            weighing=self.support, inverse=inverse, largest=u * inverse, gain=gain, lse=lse, alive=alive,
        )  # fmt: skip
        return finish_row(row, none, lost=~(self.top < math.inf))

    def _sharpness(self, terms: Terms, choice, sink, none, at_max, lse) -> tuple[Tensor, Tensor, Tensor]:
        """(1/Z, tr ∂p/∂s, log Z); the gain from products of two terms that are not both the maximum's: none cancels."""
        u, v, du, cross = at_max
        ties = self.ties
        if terms.exponential:  # rest and sink join in a shift of their own, so that nothing overflows
            m = self.shift.clamp_min(0.0) if choice.shift == "max0" else self.shift
            m = m if sink is None else torch.maximum(m, sink)
            f = torch.exp(self.shift - m)
            rest = terms.rest(m) + (0.0 if sink is None else torch.exp(sink - m))
            both = ties * u + self.u
            total_m = torch.where(none, 1.0, f * both + rest)
            pairs = ties * (ties - 1.0) * u * u + 2.0 * ties * u * self.u + self.u**2 - self.square
            gain = (f * f * pairs + f * both * rest) / total_m**2
            lse = m + torch.log(total_m)
            inverse = f / total_m
        elif terms.family == "ratio":
            rest = terms.rest(self.shift)
            others = rest + (ties - 1.0) * v + self.v
            z = others + v
            at_top = ties * (du * others + (du * v - cross))
            numerator, z2 = at_top + self.slope * z - self.cross, z * z
            gain = torch.where(z2 > 0, numerator / torch.where(z2 > 0, z2, 1.0), 0.0)
            inverse = torch.where(z > 0, 1.0 / torch.where(z > 0, z, 1.0), 0.0)
        elif terms.family == "threshold":
            inverse = torch.ones_like(u)
            g = ties * du + self.slope
            pairs = ties * (ties - 1.0) * cross + 2.0 * ties * du * self.slope + self.slope**2 - self.cross
            gain = torch.where(g > 0, pairs / torch.where(g > 0, g, 1.0), 0.0)
        else:
            inverse = torch.ones_like(u)
            gain = ties * du + self.slope
        return inverse, gain, lse


def finish_row(row: Row, none: Tensor, lost: Tensor, names: Iterable[str] = tuple(DEFINITIONS)) -> dict[str, Tensor]:
    """The statistics of rows; `none` sees no key, and `lost` has a NaN or +inf, so no weights to describe."""
    values = {}
    for name in names:
        one = DEFINITIONS[name]
        x = SPOKEN[name](row)
        x = x if one.of_sick else x.masked_fill(lost, math.nan)
        values[name] = torch.where(none, one.bare, x).squeeze(-1)
    return values


def _xlogx(u: Tensor) -> Tensor:
    """u·log u, with 0 and the gradient 0 where u has underflowed."""
    return u * torch.log(u.masked_fill(u == 0, 1.0))
