"""Properties of a ratio's tile functions at a score of −inf, found by calling them once on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from regard.normalizers import Normalizer, Ratio
from regard.normalizers._language import speak


class Traits(NamedTuple):
    """Which tile functions are 0 at −inf by themselves, so that kernels need no selection. All False unless a ratio."""

    numerator_vanishes: bool = False
    denominator_vanishes: bool = False
    slopes_vanish: bool = False


@functools.cache
def probe_traits(normalizer: Normalizer) -> Traits:
    """Evaluates a normaliser's tile functions at −inf.

    >>> from regard import normalizers
    >>> probe_traits(normalizers.get("relu").normalizer).numerator_vanishes
    True
    >>> probe_traits(normalizers.get("sigmoid").normalizer)
    Traits(numerator_vanishes=False, denominator_vanishes=False, slopes_vanish=False)
    """
    if not isinstance(normalizer, Ratio):
        return Traits()

    def vanishes(function: Callable) -> bool:
        with np.errstate(invalid="ignore"):
            return bool(speak(function)(np.float64(0.0), np.float64(-np.inf), np.float64(0.5)) == 0.0)

    slopes = normalizer.numerator_slope, normalizer.denominator_slope
    return Traits(
        vanishes(normalizer.numerator), vanishes(normalizer.denominator), all(vanishes(slope) for slope in slopes)
    )
