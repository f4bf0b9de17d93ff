"""Which compiled row kernel a problem needs: a template of its family, its normaliser's functions, and flags.

Flags are constants of the compiled code: a statistic that is not asked for costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
import torch

from regard._backends.cpu.attention import backward_rows, forward_rows
from regard._backends.cpu.attention import tiles as attention_tiles
from regard._backends.cpu.jit.compile import kernel
from regard.normalizers import Choice, Normalizer, Ratio, Threshold
from regard.normalizers._families import nothing

MADE_OF = dict(  # statistic -> the sums it takes beside those that are always kept
    visible_keys=None,
    max_logit=None,
    mean_logit="moments",
    logit_variance="moments",
    logsumexp="lse",
    mass=None,
    entropy="spread",
    effective_keys="spread",
    participation="spread",
    max_weight=None,
    support="spread",
    distance="travel",
    first_key_mass=None,
    gradient_gain="spread",
)
OWN = ["numerator", "denominator", "numerator_slope", "denominator_slope", "gain", "value", "slope", "slope_of_weight"]


def forward(choice: Choice, stats: Iterable[str], dtype: torch.dtype) -> Callable:
    """The forward kernel that gathers what these statistics are made of."""
    return _forward(choice.normalizer, _precision(dtype), **flags(stats))


def flags(stats: Iterable[str]) -> dict[str, bool]:
    """Which sums these statistics are made of."""
    sums = {MADE_OF[name] for name in stats}
    return dict(measured=bool(sums), **{name: name in sums for name in ("moments", "spread", "travel", "lse")})


def backward(choice: Choice, dtype: torch.dtype, *, from_scores: bool, watched: bool) -> Callable:
    """The backward kernel; `from_scores` keeps the scores to the end, `watched` adds the statistics' gradients."""
    return _backward(choice.normalizer, _precision(dtype), from_scores, watched)


@functools.cache
def drop(dtype: torch.dtype) -> Callable:
    return kernel(backward_rows.drop, {}, _precision(dtype))


@functools.cache
def _forward(normalizer: Normalizer, precision: str, **flags: bool) -> Callable:
    if normalizer.family == "threshold":
        template = forward_rows.forward_threshold
    else:
        template = forward_rows.forward_exponential if _exponential(normalizer) else forward_rows.forward_summed
    return kernel(template, {**tiles(normalizer, precision), **flags}, precision)


@functools.cache
def _backward(normalizer: Normalizer, precision: str, from_scores: bool, watched: bool) -> Callable:
    rows = backward_rows
    template = rows.backward_from_scores if from_scores else rows.backward_from_weights
    return kernel(template, {**tiles(normalizer, precision), "watched": watched}, precision)


def tiles(normalizer: Normalizer, precision: str) -> dict:
    """The functions (x, m, c, θ) that the templates call, and what they must know of the family."""
    family, limits = normalizer.family, np.finfo(precision)
    shift = getattr(normalizer, "shift", "none")
    found = dict(
        ratio=family == "ratio",
        coupled=family != "pointwise",
        sparse=normalizer.sparse,
        differs=isinstance(normalizer, Ratio) and normalizer.differs,
        shifted=shift != "none",
        lowest_shift=0.0 if shift == "max0" else float("-inf"),
        silent=isinstance(normalizer, Ratio) and normalizer.exponential and normalizer.rest is not nothing,
        lowest=float(np.log(limits.tiny)) - 20.0,  # its exp is 0
        smallest=float(limits.tiny),
        largest=float(limits.max),
        lanes=512 // limits.bits,
        order=getattr(normalizer, "order", 0),
        power=isinstance(normalizer, Threshold) and normalizer.is_power,
        level=attention_tiles.threshold_level if family == "threshold" else attention_tiles.plain_level,
        score=attention_tiles.threshold_score if family == "threshold" else attention_tiles.plain_level,
        rest=getattr(normalizer, "rest", nothing),
    )
    for name in ("weight", "norm", "rise", "fall", "cross", "weighs"):
        found[name] = getattr(attention_tiles, f"{family}_{name}")
    found["above"] = attention_tiles.threshold_above
    for name in OWN:
        if getattr(normalizer, name, None) is not None:
            found[name] = getattr(normalizer, name)
    return found


def _exponential(normalizer: Normalizer) -> bool:
    return isinstance(normalizer, Ratio) and normalizer.exponential


def _precision(dtype: torch.dtype) -> str:
    return "float64" if dtype == torch.float64 else "float32"
