"""The three families of normalisers.

All three share one backward, ds = a·dp − b·δ with δ = Σ_j c_j·dp_j:

    Pointwise   p = f(s)                          a = f′      b = 0       no sum
    Ratio       p = u/Z,  Z = Σv + rest           a = u′/Z    b = v′/Z    c = p
    Threshold   p = g((α−1)·s − τ),  Σp = 1       a = b = g′              c = g′/Σg′

A ratio is homogeneous: u, v and rest all scale with e^(−m), so any shift m gives the same p. Kernels hand it
e = exp(s − m) and c = exp(−m), computed the way their hardware likes best.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from regard.normalizers._language import jit, speak, tl
from regard.normalizers._record import Normalizer


@jit
def nothing(c):
    return tl.minimum(c, 0.0)  # c = exp(−m) > 0 may overflow: 0·c would be NaN


@dataclass(frozen=True, eq=False)
class Pointwise(Normalizer):
    """p = value(s, θ), each entry alone. `slope_of_weight(p, θ)`, if given, spares keeping the scores for backward.

    `log_odds(s·log2 e, θ)` = log2(1/p − 1), linear, not rising, if given, is for kernels that spare reciprocals by it.
    """

    value: Any = None
    slope: Any = None
    slope_of_weight: Any = None
    log_odds: Any = None
    family: ClassVar[str] = "pointwise"

    def _tiles_forward(self, s, theta):
        p = speak(self.value)(s, theta or 0.0)
        if self.log_odds is not None:
            power = s * np.log2(np.e)
            odds, start, step = (speak(self.log_odds)(x, theta or 0.0) for x in (power, 0.0, 1.0))
            self._must(np.allclose(p * (1 + np.exp2(odds)), 1.0), "log_odds ≠ log2(1 / value − 1)")
            self._must(np.allclose(odds, start + (step - start) * power), "log_odds is not linear")
            self._must(step <= start, "log_odds rises: kernels take a tile's largest score for its largest weight")
        return p

    def _tiles_slopes(self, s, p, theta):
        slopes = [speak(self.slope)(s, theta or 0.0)]
        if self.slope_of_weight is not None:
            slopes.append(speak(self.slope_of_weight)(p, theta or 0.0))
        return [(a, 0.0, 0.0) for a in slopes]

    def cold(self, scores, visible, theta):
        """A step: what the largest number weighs above 0, what the lowest does below, what 0 does at 0."""
        far = torch.sign(scores) * torch.finfo(scores.dtype).max
        return self.reference(far, visible, theta)


@dataclass(frozen=True, eq=False)
class Ratio(Normalizer):
    """p = u/Z with Z = Σv + rest(c); Z = 0 gives p = 0. Tile functions take (e, s, c): e = exp(s − m), c = exp(−m).

    They know no parameter: a ratio that takes one is made with fused=False.
    `denominator` (v) and its slope default to the numerator's. `shift` says what m is: "max" (the row's maximum),
    "max0" (at least 0, so that c cannot overflow) or "none" (m = 0; e must then not be used). `exponential` states
    u = v = e: then log u = s − m needs no logarithm. `slope_of_weight(p, 1/Z)` = a = b, if that is all backward needs.
    `signed(e, s, c)` = w with u = max(w, 0) and v = |w|, if there is such a w: rounding to 16 bits can clip as it goes.
    """

    numerator: Any = None
    numerator_slope: Any = None
    denominator: Any = None
    denominator_slope: Any = None
    rest: Any = nothing
    shift: str = "max"
    exponential: bool = False
    slope_of_weight: Any = None
    signed: Any = None
    family: ClassVar[str] = "ratio"

    def __post_init__(self) -> None:
        if self.denominator is None:
            object.__setattr__(self, "denominator", self.numerator)
            object.__setattr__(self, "denominator_slope", self.numerator_slope)
        known = self.parameter is None or not self.fused
        self._must(known, "the tile functions of a ratio know no parameter; set fused=False")
        if self.shift not in ("max", "max0", "none"):
            raise ValueError(f"shift must be 'max', 'max0' or 'none', got {self.shift!r}")
        super().__post_init__()

    @property
    def proportional(self) -> bool:
        """True if u and Z grow in proportion to the scores: a factor common to all of them changes no weight."""
        e, y, c = np.ones(5), np.linspace(-2.0, 2.0, 5), np.ones(5)
        sides = [speak(side) for side in (self.numerator, self.denominator)]
        linear = all(np.allclose(side(e, 3.0 * y, c), 3.0 * side(e, y, c)) for side in sides)
        return bool(self.shift == "none" and linear and not np.any(speak(self.rest)(c)))

    @functools.cached_property
    def differs(self) -> bool:
        """True if u and v are functions of e − c: e^y − 1 without cancellation may stand for e beside c = 0."""
        e, y, c = np.linspace(0.0, 2.0, 5), np.linspace(-2.0, 2.0, 5), np.ones(5)
        sides = [speak(side) for side in (self.numerator, self.denominator)]
        moves = not np.allclose(sides[0](e, y, c), sides[0](e, y, 0.0 * c))
        return bool(moves and all(np.allclose(side(e, y, c), side(e - c, y, 0.0 * c)) for side in sides))

    def _frame(self, s):
        m = np.zeros((len(s), 1)) if self.shift == "none" else s.max(-1, keepdims=True)
        m = np.maximum(m, 0.0) if self.shift == "max0" else m
        e, c = np.exp(s - m), np.exp(-m)
        z = speak(self.denominator)(e, s, c).sum(-1, keepdims=True) + speak(self.rest)(c)
        return e, c, np.divide(1.0, z, out=np.zeros_like(z), where=z > 0)

    def _tiles_forward(self, s, theta):
        e, c, inverse = self._frame(s)
        u, v = speak(self.numerator)(e, s, c), speak(self.denominator)(e, s, c)
        stated = not self.exponential or (np.allclose(u, e) and np.allclose(v, e))
        self._must(stated, "exponential states that u and v are e, and kernels take e for them")
        if self.signed is not None:
            w = speak(self.signed)(e, s, c)
            self._must(np.allclose(np.maximum(w, 0.0), u) and np.allclose(np.abs(w), v), "max(w, 0) ≠ u or |w| ≠ v")
        return u * inverse

    def _tiles_slopes(self, s, p, theta):
        e, c, inverse = self._frame(s)
        a = speak(self.numerator_slope)(e, s, c) * inverse
        slopes = [(a, speak(self.denominator_slope)(e, s, c) * inverse, p)]
        if self.slope_of_weight is not None:
            a = speak(self.slope_of_weight)(p, inverse)
            slopes.append((a, a, p))
        return slopes


@dataclass(frozen=True, eq=False)
class Threshold(Normalizer):
    """p = value(t, θ) with t = max(gain(θ)·s − τ, 0) and τ such that Σp = 1; slope(t, θ) = ∂p/∂s at fixed τ.

    `gain` is α − 1 for entmax. value must be convex and increasing in t with value(1) = 1: then τ lies between
    max − 1 and max (of gain·s), and Newton's steps from max − 1 never overshoot.
    """

    gain: Any = None
    value: Any = None
    slope: Any = None
    slope_of_weight: Any = None
    order: int = field(default=0)  # 1: value = t, 2: value = t²; the solver may then use sums of t; 0: anything else
    family: ClassVar[str] = "threshold"

    def _check_tiles(self, rows, theta):
        t = np.linspace(0.0, 1.0, 33)
        p = speak(self.value)(t, theta or 0.0)
        self._must(np.isclose(p[-1], 1.0) and abs(p[0]) < 1e-12, "value must run from value(0) = 0 to value(1) = 1")
        self._must((np.diff(p) > 0).all() and (np.diff(p, 2) > -1e-12).all(), "value must be increasing and convex")
        self._must(self.order == 0 or np.allclose(p, t**self.order), "value must be t**order")
        super()._check_tiles(rows, theta)

    @functools.cached_property
    def is_power(self) -> bool:
        """True if value(t) = t^(1/gain) and slope(t) = value(t)/t for every parameter: Newton has a better step."""
        t = np.linspace(0.1, 1.0, 10)
        for theta in self._fused_thetas():
            power = t ** (1.0 / speak(self.gain)(theta or 0.0))
            pairs = (self.value, power), (self.slope, power / t)
            if not all(np.allclose(speak(side)(t, theta or 0.0), want) for side, want in pairs):
                return False
        return True

    def _solve(self, s, theta):
        x = speak(self.gain)(theta or 0.0) * s
        low, high = x.max(-1, keepdims=True) - 1.0, x.max(-1, keepdims=True)
        for _ in range(80):
            middle = (low + high) / 2
            above = speak(self.value)(np.maximum(x - middle, 0.0), theta or 0.0).sum(-1, keepdims=True) > 1.0
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.maximum(x - low, 0.0)

    def _tiles_forward(self, s, theta):
        return speak(self.value)(self._solve(s, theta), theta or 0.0)

    def _tiles_slopes(self, s, p, theta):
        from_scores = speak(self.slope)(self._solve(s, theta), theta or 0.0)
        found = [from_scores, speak(self.slope_of_weight)(p, theta or 0.0)]
        return [(a, a, a / a.sum(-1, keepdims=True)) for a in found]
