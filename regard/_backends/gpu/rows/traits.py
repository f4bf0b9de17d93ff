"""What the row kernels may lean on in a ratio's tile functions, found by trying them: no normaliser has to state it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from regard.normalizers import Normalizer, Ratio
from regard.normalizers._language import speak


class Traits(NamedTuple):
    """All False of families other than ratios, but for `faint`."""

    numerator_ends: bool = False  # u is 0 of a score −inf
    denominator_ends: bool = False  # v is
    slopes_end: bool = False  # and so are u′ and v′
    differs: bool = False  # u and v are functions of e − c
    proportional: bool = False  # u and Z grow in proportion to the scores: a factor common to all changes no weight
    faint: bool = False  # the scale is so small that no finite score can stand for −inf


@functools.cache
def traits_of(normalizer: Normalizer, faint: bool) -> Traits:
    """The traits of a normaliser at a scale that is faint or not.

    >>> from regard import normalizers
    >>> traits_of(normalizers.get("relu").normalizer, False).proportional
    True
    >>> traits_of(normalizers.get("softpick").normalizer, False).differs
    True
    """
    if not isinstance(normalizer, Ratio):
        return Traits(faint=faint)
    u, v = (speak(side) for side in (normalizer.numerator, normalizer.denominator))
    slopes = [speak(slope) for slope in (normalizer.numerator_slope, normalizer.denominator_slope)]

    def ends(side) -> bool:
        with np.errstate(invalid="ignore"):
            return bool(side(np.float64(0.0), np.float64(-np.inf), np.float64(0.5)) == 0.0)

    return Traits(
        numerator_ends=ends(u),
        denominator_ends=ends(v),
        slopes_end=all(ends(slope) for slope in slopes),
        differs=normalizer.differs,
        proportional=normalizer.proportional,
        faint=faint,
    )
