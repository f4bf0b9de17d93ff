"""`Estimate`: a measured number with its interval, value ± t·s/√n (99.99 %; t = 3.89 for many samples).

The level is high because the lab makes some two hundred comparisons, and none should fail by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL = 0.9999
Z = 3.8906  # the normal quantile of (1 + LEVEL) / 2


@dataclass(frozen=True)
class Estimate:
    """A value and its interval, low ≤ value ≤ high; in a figure or a text with a format it is the value."""

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        if self.low == self.high:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def __float__(self) -> float:
        return self.value

    def __format__(self, form: str) -> str:
        return format(self.value, form) if form else repr(self)


def exact(value: float | Tensor) -> Estimate:
    """Return the estimate of a number that was computed, not sampled."""
    value = float(value)
    return Estimate(value, value, value)


def student(n: int, level: float = LEVEL) -> float:
    """Return Student's quantile of (1 + level) / 2 for the mean of n samples (4.33 for n = 40)."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, n - 1))


def mean(samples: Tensor) -> Estimate:
    """Estimate the mean of independent samples (N,); average samples that share a query or key first."""
    x = samples.double().flatten()
    half = student(len(x)) * float(x.std()) / math.sqrt(len(x))
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half)


def share(hits: Tensor) -> Estimate:
    """Estimate how often a bool is True (Wilson's interval, valid also at 0 and 1)."""
    n, p = hits.numel(), float(hits.double().mean())
    middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return Estimate(p, min(p, middle - half), max(p, middle + half))


def quantile(samples: Tensor, q: float) -> Estimate:
    """Estimate the q-quantile of independent samples, with an interval from order statistics."""
    x = samples.double().flatten().sort().values
    n = len(x)
    half = Z * math.sqrt(n * q * (1 - q))
    low, high = math.floor(n * q - half), math.ceil(n * q + half)
    if low < 0 or high >= n:
        raise ValueError(f"samples: {n} are too few for the {q}-quantile at this level; draw more")
    return Estimate(float(x[round(q * (n - 1))]), float(x[low]), float(x[high]))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Estimate a − b of independent estimates: half-widths add in squares."""
    half = math.hypot(a.high - a.low, b.high - b.low) / 2
    return Estimate(a.value - b.value, a.value - b.value - half, a.value - b.value + half)


def ratio(a: Estimate, b: Estimate) -> Estimate:
    """Estimate a / b of positive estimates, from the least quotient to the greatest."""
    return Estimate(a.value / b.value, a.low / b.high, a.high / b.low)


def exponent(x: list[float], y: Tensor) -> Estimate:
    """Estimate b of y ∝ x^b: the slope of log mean(y) against log x, for y (len(x), N)."""
    log_x = torch.tensor(x, dtype=torch.float64).log()
    y = y.double()
    centred = (log_x - log_x.mean()) / ((log_x - log_x.mean()) ** 2).sum()
    error = y.std(-1) / y.mean(-1) / math.sqrt(y.shape[-1])  # of log mean(y)
    slope = float((centred * y.mean(-1).log()).sum())
    half = student(y.shape[-1]) * float(((centred * error) ** 2).sum().sqrt())
    return Estimate(slope, slope - half, slope + half)
