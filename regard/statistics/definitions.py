"""Each statistic once: which sums of a row it takes, how it follows from them, its histogram's scale and its meaning.

A new statistic is one entry of `DEFINITIONS` and a line of docs/statistics.md; torch and the CPU kernels compute it
from `Row`, and reports show it. GPU kernels store it in `_backends/gpu/attention/statistics.py`. A new *sum* is also a
field of `Row`, made in `state.py` and, of weights that somebody holds, in `dense.py`, and a line of
`_backends/cpu/attention/forward_rows.py`.

The functions below are written in the tile language (`regard.normalizers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from regard.normalizers._language import jit, tl


class Row(NamedTuple):
    """What the statistics of a row are finished from. The maximum is kept out of the sums, so that nothing cancels.

    u, v, u′ and cross are those of `Terms`. Marked ': over the keys below the maximum.
    """

    n: Any  # visible keys
    top: Any  # max s
    mean: Any  # of s
    m2: Any  # Σ (s − mean)²
    ties: Any  # keys with s = top
    u: Any  # of a key at the maximum; 1 where it is 0
    others: Any  # Σ' u / u
    lower: Any  # Σ' u·log(u / u_max) / u_max
    squares: Any  # Σ u² / u_max²
    far: Any  # Σ u·|i − j|
    first: Any  # u of the first visible key
    weighing: Any  # keys with u > 0
    inverse: Any  # 1 / Z
    largest: Any  # u·inverse of a key at the maximum
    gain: Any  # tr ∂p/∂s
    lse: Any  # log Σ exp(s), with the sink's term
    alive: Any  # is there any weight?


class Definition(NamedTuple):
    """A statistic: the sums that it takes beside those always kept, its value, and how reports show it."""

    sums: str | None
    finish: Callable[[Row], Any]
    scale: tuple[str, float, float]  # of its histogram, and the first and last edge: `health.measure.histogram`
    words: str
    bare: float = 0.0  # of a row that sees no key
    of_sick: bool = False  # keeps its value in a row with a NaN or +inf among its logits


@jit
def log1p(x):
    """log(1 + x) for x ≥ 0, without losing a small x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))


@jit
def visible_keys(r):
    return r.n


@jit
def max_logit(r):
    return r.top


@jit
def mean_logit(r):
    return r.mean


@jit
def logit_variance(r):
    return r.m2 / tl.maximum(r.n, 1.0)


@jit
def logsumexp(r):
    return r.lse


@jit
def mass(r):
    return tl.where(r.alive, r.u * (r.ties + r.others) * r.inverse, 0.0)


@jit
def entropy(r):
    """log Σu/u_max − Σ' (u/u_max)·log(u/u_max) / Σu/u_max: no cancellation, however near one-hot the row is."""
    value = log1p((r.ties - 1.0) + r.others) - r.lower / tl.where(r.alive, r.ties + r.others, 1.0)
    return tl.where(r.alive, tl.maximum(value, 0.0), 0.0)


@jit
def effective_keys(r):
    return tl.where(r.alive, tl.exp(entropy(r)), 0.0)


@jit
def participation(r):
    return tl.where(r.alive, (r.ties + r.others) * (r.ties + r.others) / r.squares, 0.0)


@jit
def max_weight(r):
    return r.largest


@jit
def support(r):
    return r.weighing


@jit
def distance(r):
    return tl.where(r.alive, r.far / tl.where(r.alive, r.u * (r.ties + r.others), 1.0), 0.0)


@jit
def first_key_mass(r):
    return tl.where(r.alive, r.first / tl.where(r.alive, r.u * (r.ties + r.others), 1.0), 0.0)


@jit
def gradient_gain(r):
    return tl.maximum(r.gain, 0.0)


INF = float("inf")
COUNT, LOGIT, SHARE = ("log", -2.0, 7.0), ("asinh", -15.0, 15.0), ("share", 0.0, 1.28)
DEFINITIONS = dict(
    visible_keys=Definition(None, visible_keys, COUNT, "The number of keys that a query may look at.", of_sick=True),
    max_logit=Definition(
        None, max_logit, LOGIT, "The largest logit of one row.", -INF, of_sick=True
    ),
    mean_logit=Definition("logits", mean_logit, LOGIT, "The mean logit of a row."),
    logit_variance=Definition(
        "logits", logit_variance, ("log", -8.0, 8.0),
        "How far a row's logits are spread; the scale 1/√d aims at 1 at the start of training.",
    ),
    logsumexp=Definition(
        "exponentials", logsumexp, LOGIT,
        "log Σ exp(logits): the size of the softmax's denominator, including the sink.", -INF,
    ),
    mass=Definition(None, mass, SHARE, "The sum of a row's weights: less than 1 if a sink takes some."),
    entropy=Definition(
        "weights", entropy, ("nats", -21.0, 40.0),
        "How evenly a row spreads its weight, in nats: 0 is one key, ln(visible keys) is evenly over all.",
    ),
    effective_keys=Definition(
        "weights", effective_keys, COUNT, "The number of keys that share a row's weight: e to the entropy."
    ),
    participation=Definition(
        "weights", participation, COUNT,
        "The number of keys that share a row's weight, 1/Σp̄²; small weights count less.",
    ),
    max_weight=Definition(
        None, max_weight, SHARE, "The largest weight of a row: near 1 means that the query looks at one key."
    ),
    support=Definition("weights", support, COUNT, "The number of keys with a weight above 0."),
    distance=Definition("distance", distance, COUNT, "How many tokens away a row looks, on average."),
    first_key_mass=Definition(
        None, first_key_mass, SHARE, "The weight on the first visible key: large for attention sinks."
    ),
    gradient_gain=Definition(
        "weights", gradient_gain, SHARE,
        "How much gradient passes through the normaliser: the trace of its Jacobian.",
    ),
)  # fmt: skip
OF_LOGITS = ("max_logit", "mean_logit", "logit_variance", "logsumexp", "gradient_gain")  # which weights do not tell
