"""The three families, and the record that checks its own mathematics when it is made.

All three share one backward, ds = a·dp − b·δ with δ = Σ_j c_j·dp_j:

    Pointwise   p = f(s)                          a = f′      b = 0       no sum
    Ratio       p = u/Z,  Z = Σv + rest           a = u′/Z    b = v′/Z    c = p
    Threshold   p = g((α−1)·s − τ),  Σp = 1       a = b = g′              c = g′/Σg′

A ratio is homogeneous: u, v and rest all scale with e^(−m), so any shift m gives the same p. Kernels hand it
e = exp(s − m) and c = exp(−m), computed the way their hardware likes best.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.normalizers._language import jit, speak, tl


@jit
def nothing(c):
    return tl.minimum(c, 0.0)  # c = exp(−m) > 0 may overflow: 0·c would be NaN


@dataclass(frozen=True)
class Parameter:
    """One number that a normaliser takes: `entmax(alpha=1.25)`, `sigmoid(bias=-3)`, and where its tile functions serve.

    Above `fused_high` they break the family's law, and the reference computes. Towards low values they may magnify
    rounding: below `wide_below` rows take float64, below `series_below` the record's `series`; attention, which keeps
    its dtype, goes by the reference below `fused_low`. Outside [wide_below, fused_high] statistics and Jacobian of a
    threshold map take the reference's weights, which τ does not tell.
    """

    name: str
    default: float
    low: float = float("-inf")
    high: float = float("inf")
    fused_low: float = float("-inf")
    fused_high: float = float("inf")
    parts_high: float = float("inf")  # above it rows in parts are refused: what the parts share does not tell weights
    wide_below: float = float("-inf")
    series_below: float = float("-inf")
    softmax_at: float | None = None  # where the map is softmax

    def check(self, value: float) -> float:
        if not (self.low <= value <= self.high):  # also refuses NaN
            raise ValueError(f"{self.name} must lie in [{self.low:g}, {self.high:g}], got {value!r}")
        return float(value)

    @property
    def around(self) -> list[float]:
        """The default and others: what is said of a map whatever its parameter has to hold for all of them."""
        others = (self.default - 1.0, self.default + 1.0, -self.default)
        return [self.default, *(min(max(value, self.low), self.high) for value in others)]


@dataclass(frozen=True)
class Normalizer:
    """A map from a row of scores to weights: what it is, and its mathematics in two languages.

    `reference(scores, visible, theta)` is plain torch on the last dimension, meant for float64; autograd is its
    backward. `visible` is a bool tensor (True = counts) or None; `theta` the parameter (number or tensor) or None.
    `series` takes the same: a form without derivatives, for parameters below `series_below`.
    The families below add the tile functions of the fused kernels.
    """

    name: str
    formula: str
    sums_to: str
    sparse: bool
    paper: str
    reference: Callable[[Tensor, Tensor | None, Any], Tensor]
    parameter: Parameter | None = None
    fused: bool = True  # False: reference only, and a fused call says so
    parameter_vjp: Callable[[Tensor, Tensor, Any], Tensor] | None = None  # (p, dp, θ [R, 1]) → dθ [R], if θ can learn
    series: Callable[[Tensor, Tensor | None, Any], Tensor] | None = None
    scale_free: bool = field(init=False)  # a factor common to all scores changes no weight: nor does a temperature
    rises: bool = field(init=False)  # of a row's keys, one with a larger score weighs no less
    family: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name must be an identifier, got {self.name!r}")
        with torch.device("cpu"):  # whatever the default device is when this is made
            self._check()

    def __copy__(self) -> Normalizer:  # it never changes
        return self

    def __deepcopy__(self, memo: dict) -> Normalizer:
        return self

    def __reduce__(self) -> tuple:
        """A record is pickled as its name, by which kernels find it too."""
        from regard import normalizers

        return normalizers.record, (normalizers.get(self).name,)

    def _check(self) -> None:
        rows = np.array([[0.3, -1.2, 2.0, 0.3], [5.0, -5.0, 0.1, 4.9], [-0.4, -0.1, -2.0, -3.0]])
        theta = None if self.parameter is None else self.parameter.default
        p = self.reference(torch.from_numpy(rows), None, theta).numpy()
        q = self.reference(torch.from_numpy(rows[:, ::-1].copy()), None, theta).numpy()
        self._must(np.isfinite(p).all() and (p >= 0).all(), "weights must be finite and ≥ 0")
        self._must(np.allclose(p, q[:, ::-1], atol=1e-12), "reordering the scores must reorder the weights")
        thetas = [None] if self.parameter is None else self.parameter.around
        object.__setattr__(self, "scale_free", all(self._is_scale_free(rows, value) for value in thetas))
        object.__setattr__(self, "rises", all(self._rises(value) for value in thetas))
        self._must(not self.fused or np.allclose(p, self._tiles_forward(rows, theta), atol=1e-9), "tiles ≠ reference")
        if self.fused:
            dp = np.cos(np.arange(rows.size)).reshape(rows.shape)
            s = torch.from_numpy(rows).requires_grad_()
            ds = torch.autograd.grad(self.reference(s, None, theta), s, torch.from_numpy(dp))[0].numpy()
            for a, b, c in self._tiles_slopes(rows, p, theta):
                ours = a * dp - b * (c * dp).sum(-1, keepdims=True)
                self._must(np.allclose(ds, ours, atol=1e-7), "tile slopes ≠ derivative of the reference")
        if self.parameter is not None and self.parameter.series_below > float("-inf"):
            self._must(self.parameter.series_below <= self.parameter.wide_below, "series_below lies above wide_below")
            low = torch.from_numpy(rows), None, self.parameter.low
            same = self.series is not None and torch.allclose(self.series(*low), self.reference(*low), atol=1e-12)
            self._must(same, "series ≠ reference at the lowest parameter")
        if self.parameter_vjp is not None:
            scores, step = torch.from_numpy(rows), 1e-5
            grads = torch.ones_like(scores).cumsum(-1)
            up, down = (self.reference(scores, None, theta + h) for h in (step, -step))
            slope = ((up - down) * grads).sum(-1) / (2 * step)
            column = torch.full((len(rows), 1), float(theta), dtype=scores.dtype)
            ours = self.parameter_vjp(self.reference(scores, None, theta), grads, column)
            self._must(torch.allclose(slope, ours, atol=1e-5), "parameter_vjp ≠ derivative in the parameter")

    def _is_scale_free(self, rows: np.ndarray, theta: Any) -> bool:
        p, *scaled = (self.reference(torch.from_numpy(factor * rows), None, theta) for factor in (1.0, 0.01, 100.0))
        return all(torch.allclose(p, other, rtol=1e-9, atol=1e-12) for other in scaled)

    def _rises(self, theta: Any) -> bool:
        line = self.reference(torch.linspace(-4.0, 4.0, 33, dtype=torch.float64)[None], None, theta)
        return bool((line.diff() >= -1e-12).all())

    def _must(self, holds: Any, what: str) -> None:
        if not holds:
            raise ValueError(f"normaliser {self.name!r}: {what}")

    def _tiles_forward(self, s: np.ndarray, theta: Any) -> np.ndarray:
        raise TypeError(f"normaliser {self.name!r}: make a Pointwise, Ratio or Threshold, or set fused=False")

    def _tiles_slopes(self, s: np.ndarray, p: np.ndarray, theta: Any) -> list[tuple[Any, Any, Any]]:
        raise TypeError(f"normaliser {self.name!r}: make a Pointwise, Ratio or Threshold, or set fused=False")

    def cold(self, scores: Tensor, visible: Tensor | None, theta: Any) -> Tensor:
        """The limit of temperature → 0⁺: all weight on the maximum, shared equally between ties."""
        if self.scale_free:
            return self.reference(scores, visible, theta)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        winners = ((scores == top) & (scores > float("-inf"))).to(scores.dtype)
        return winners / winners.sum(-1, keepdim=True).clamp_min(1)

    def hot(self, scores: Tensor, visible: Tensor | None, theta: Any) -> Tensor:
        """The limit of temperature → ∞: the map of equal scores, uniform over the visible entries."""
        if self.scale_free:
            return self.reference(scores, visible, theta)
        seen = scores > float("-inf") if visible is None else visible & (scores > float("-inf"))
        return self.reference(torch.zeros_like(scores), seen, theta)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Ratio(Normalizer):
    """p = u/Z with Z = Σv + rest(c); Z = 0 gives p = 0. Tile functions take (e, s, c): e = exp(s − m), c = exp(−m).

    `denominator` (v) and its slope default to the numerator's. `shift` says what m is: "max" (the row's maximum),
    "max0" (at least 0, so that c cannot overflow) or "none" (m = 0; e must then not be used). `exponential` states
    u = e, so that log u = s − m needs no logarithm. `slope_of_weight(p, 1/Z)` = a = b, if that is all backward needs.
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
        if self.shift not in ("max", "max0", "none"):
            raise ValueError(f"shift must be 'max', 'max0' or 'none', got {self.shift!r}")
        super().__post_init__()

    @property
    def proportional(self) -> bool:
        """Do u and Z grow in proportion to the scores? Then a factor common to all of them changes no weight."""
        e, y, c = np.ones(5), np.linspace(-2.0, 2.0, 5), np.ones(5)
        sides = [speak(side) for side in (self.numerator, self.denominator)]
        linear = all(np.allclose(side(e, 3.0 * y, c), 3.0 * side(e, y, c)) for side in sides)
        return bool(self.shift == "none" and linear and not np.any(speak(self.rest)(c)))

    @functools.cached_property
    def differs(self) -> bool:
        """Are u and v functions of e − c? Then e^y − 1, told without cancellation, may stand for e beside c = 0."""
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


@dataclass(frozen=True)
class Threshold(Normalizer):
    """p = value(t, θ) with t = max(gain(θ)·s − τ, 0) and τ such that Σp = 1; slope(t, θ) = ∂p/∂s at fixed τ.

    `gain` is α − 1 for entmax. value must be convex and increasing in t with value(1) = 1: then τ lies between
    max − 1 and max (of gain·s), and Newton's steps from max − 1 never overshoot. `reference_slope(p, θ)` and
    `reference_excess(p, θ)` = t, if given, are slope_of_weight and value's inverse in torch, for weights of any size.
    """

    gain: Any = None
    value: Any = None
    slope: Any = None
    slope_of_weight: Any = None
    reference_slope: Callable[[Tensor, Any], Tensor] | None = None
    reference_excess: Callable[[Tensor, Any], Tensor] | None = None
    order: int = field(default=0)  # 1: value = t, 2: value = t²; the solver may then use sums of t; 0: anything else
    family: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        theta = 0.0 if self.parameter is None else self.parameter.default
        t = np.linspace(0.0, 1.0, 33)
        p = speak(self.value)(t, theta)
        self._must(np.isclose(p[-1], 1.0) and abs(p[0]) < 1e-12, "value must run from value(0) = 0 to value(1) = 1")
        self._must((np.diff(p) > 0).all() and (np.diff(p, 2) > -1e-12).all(), "value must be increasing and convex")
        self._must(self.order == 0 or np.allclose(p, t**self.order), "value must be t**order")
        super().__post_init__()

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
        if self.reference_slope is not None:
            found.append(self.reference_slope(torch.from_numpy(p), theta).numpy())
        if self.reference_excess is not None:
            t = self.reference_excess(torch.from_numpy(p), theta).numpy()
            self._must(np.allclose(t, self._solve(s, theta), atol=1e-7), "reference_excess ≠ inverse of value")
        return [(a, a, a / a.sum(-1, keepdims=True)) for a in found]
