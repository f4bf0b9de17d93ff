"""`Normalizer`, a record that checks its own mathematics when it is made, and `Parameter`, the number it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.normalizers._language import speak

NEAREST = 1e-8  # a parameter nearer than this to `softmax_at` is softmax: weights differ by less


@dataclass(frozen=True)
class Parameter:
    """One number that a normaliser takes: `entmax(alpha=1.25)`, `sigmoid(bias=-3)`, and where its tile functions serve.

    Outside [fused_low, fused_high] they do not, and the reference computes; but where they only magnify rounding, below
    `wide_below`, rows take float64.

    `by_keys` names functions of n, the number of keys that a row sees: "sigmoid(bias=-log(n))". `learned_from` is the
    one of them that a learned parameter is added to.
    """

    name: str
    default: float
    low: float = float("-inf")
    high: float = float("inf")
    fused_low: float = float("-inf")
    fused_high: float = float("inf")
    wide_below: float = float("-inf")
    softmax_at: float | None = None  # where the map is softmax
    by_keys: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict, hash=False)
    learned_from: str | None = None

    def check(self, value: float) -> float:
        if not (self.low <= value <= self.high):  # also refuses NaN
            raise ValueError(f"{self.name} must lie in [{self.low:g}, {self.high:g}], got {value!r}")
        return float(value)

    def keep_off_softmax(self, theta: Tensor) -> Tensor:
        """θ at least `NEAREST` above `softmax_at`, where tile functions divide by 0; its gradient passes."""
        if self.softmax_at is None:
            return theta
        return theta + (theta.clamp_min(self.softmax_at + NEAREST) - theta).detach()

    @property
    def around(self) -> list[float]:
        """The default and others: what is said of a map whatever its parameter has to hold for all of them."""
        return self._within(self.low, self.high)

    @property
    def fused_around(self) -> list[float]:
        """The default and other parameters that the tile functions serve, without the one that is softmax."""
        found = self._within(max(self.low, self.fused_low), min(self.high, self.fused_high))
        return [value for value in found if value != self.softmax_at]

    def _within(self, low: float, high: float) -> list[float]:
        others = (self.default - 1.0, self.default + 1.0, -self.default)
        return [self.default, *(min(max(value, low), high) for value in others)]


@dataclass(frozen=True, eq=False)  # compared by identity: kernels are kept by record
class Normalizer:
    """A map from a row of scores to weights: what it is, and its mathematics in two languages.

    `reference(scores, visible, theta)` is plain torch on the last dimension, meant for float64; autograd is its
    backward. `visible` is a bool tensor (True = counts) or None; `theta` the parameter (number or tensor) or None.
    `parameter_slope(p, θ)` is a tile function h with ∂p/∂θ = h − g′·Σh / Σg′ (pointwise: ∂p/∂θ = h), if θ can be
    learned in attention: then dθ = Σ h·dp − δ·Σh.
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
    parameter_slope: Any = None
    ordered: bool = False  # the order of the keys matters; a larger score of another key may take weight away
    trace: Callable[[Tensor, Tensor | None, Any], Tensor] | None = None  # tr ∂p/∂s, for maps without tile functions
    use_when: str = ""  # one line for `regard list`, from the measurements of docs/what-wins.md; "" if not measured
    scale_free: bool = field(init=False)  # a factor common to all scores changes no weight: nor does a temperature
    rises: bool = field(init=False)  # of a row's keys, one with a larger score weighs no less
    family: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name must be an identifier, got {self.name!r}")
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():  # wherever it is first named
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
        same = np.allclose(p, q[:, ::-1], atol=1e-12)
        self._must(same or self.ordered, "reordering the scores must reorder the weights; state ordered=True")
        self._must(not (same and self.ordered), "ordered=True, but reordering the scores reorders the weights")
        if self.trace is not None:
            jacobian = torch.autograd.functional.jacobian(
                lambda s: self.reference(s, None, theta).sum(0), torch.from_numpy(rows)
            )  # [n, rows, n]
            diagonal = jacobian.diagonal(dim1=0, dim2=2).sum(-1)
            self._must(torch.allclose(diagonal, self.trace(torch.from_numpy(rows), None, theta)), "trace ≠ tr ∂p/∂s")
        thetas = [None] if self.parameter is None else self.parameter.around
        found = []
        for value in thetas:
            try:
                found.append((self._is_scale_free(rows, value), self._rises(value)))
            except ArithmeticError as wrong:
                at = f" at {self.parameter.name} = {value:g}; say by low and high what it is" if self.parameter else ""
                raise ValueError(f"normaliser {self.name!r}: the reference fails ({wrong}){at}") from wrong
        for name, holds in zip(("scale_free", "rises"), zip(*found, strict=True), strict=True):
            object.__setattr__(self, name, all(holds))
        for value in self._fused_thetas() if self.fused else ():
            try:
                self._check_tiles(rows, value)
            except ArithmeticError as wrong:
                at = f"; say where they serve by fused_low and fused_high, {value} is too far" if self.parameter else ""
                raise ValueError(f"normaliser {self.name!r}: the tile functions fail ({wrong}){at}") from wrong
        if self.parameter_vjp is not None:
            assert theta is not None  # the default of its parameter
            scores, step = torch.from_numpy(rows), 1e-5
            grads = torch.ones_like(scores).cumsum(-1)
            up, down = (self.reference(scores, None, theta + h) for h in (step, -step))
            slope = ((up - down) * grads).sum(-1) / (2 * step)
            column = torch.full((len(rows), 1), float(theta), dtype=scores.dtype)
            ours = self.parameter_vjp(self.reference(scores, None, theta), grads, column)
            self._must(torch.allclose(slope, ours, atol=1e-5), "parameter_vjp ≠ derivative in the parameter")
        if self.parameter_slope is not None:
            for value in self._fused_thetas():
                self._check_parameter_slope(rows, value)

    def _fused_thetas(self) -> list[Any]:
        return [None] if self.parameter is None else self.parameter.fused_around

    def _check_tiles(self, rows: np.ndarray, theta: Any) -> None:
        at = "" if self.parameter is None else f" at {self.parameter.name} = {theta:g}"
        s, dp = torch.from_numpy(rows).requires_grad_(), np.cos(np.arange(rows.size)).reshape(rows.shape)
        weights = self.reference(s, None, theta)
        p = weights.detach().numpy()
        self._must(np.allclose(p, self._tiles_forward(rows, theta), atol=1e-9), f"tiles ≠ reference{at}")
        (ds,) = torch.autograd.grad((weights * torch.from_numpy(dp)).sum(), s)  # of a sum: vectors import sympy
        for a, b, c in self._tiles_slopes(rows, p, theta):
            ours = a * dp - b * (c * dp).sum(-1, keepdims=True)
            self._must(np.allclose(ds.numpy(), ours, atol=1e-7), f"tile slopes ≠ derivative of the reference{at}")

    def _check_parameter_slope(self, rows: np.ndarray, theta: float) -> None:
        assert self.parameter is not None
        step = 1e-5 if theta - 1e-5 >= self.parameter.low else 0.0  # one-sided at the end of the range
        up, down = (self.reference(torch.from_numpy(rows), None, theta + h).numpy() for h in (1e-5, -step))
        p = self.reference(torch.from_numpy(rows), None, theta).numpy()
        h = speak(self.parameter_slope)(p, theta)
        if self.family == "threshold":
            share = self._tiles_slopes(rows, p, theta)[0][2]
            h = h - share * h.sum(-1, keepdims=True)
        same = np.allclose((up - down) / (1e-5 + step), h, atol=1e-4)
        self._must(same, f"parameter_slope ≠ derivative in {self.parameter.name} at {theta:g}")

    def _is_scale_free(self, rows: np.ndarray, theta: Any) -> bool:
        p, *scaled = (self.reference(torch.from_numpy(factor * rows), None, theta) for factor in (1.0, 0.01, 100.0))
        return all(torch.allclose(p, other, rtol=1e-9, atol=1e-12) for other in scaled)

    def _rises(self, theta: Any) -> bool:
        if self.ordered:
            return False
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
