"""Compiles the row kernels that a problem needs: a template of its family, its normaliser's functions, and flags.

Flags are constants of the compiled code: a statistic that is not asked for costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import numpy as np

from regard._backends.cpu.attention import backward_rows, families, forward_rows
from regard._backends.cpu.jit.compile import cache_by_normalizer, kernel
from regard.normalizers import Normalizer, Ratio, Threshold
from regard.normalizers._families import nothing
from regard.statistics import NAMES
from regard.statistics.definitions import DEFINITIONS

REQUIRED_SUMS = {name: one.sums and f"sums_{one.sums}" for name, one in DEFINITIONS.items()}
BARE = np.array([one.bare for one in DEFINITIONS.values()])
FLAGS = tuple(sorted({sums for sums in REQUIRED_SUMS.values() if sums}))
OWN = (
    "numerator", "denominator", "numerator_slope", "denominator_slope", "gain", "value", "slope", "parameter_slope",
)  # fmt: skip
NO_SINK = np.array([-np.inf])
MAX_LANES = 16  # of a vector, in any precision
OF_FAMILY = ("weight", "norm", "weight_slope", "norm_slope", "slope_product", "has_weight")


def statistics_flags(stats: Iterable[str]) -> dict[str, bool]:
    """Which sums these statistics take, as flags of the templates."""
    sums = {REQUIRED_SUMS[name] for name in stats}
    return dict(has_stats=bool(sums), **{name: name in sums for name in FLAGS})


@cache_by_normalizer
def forward_kernel(normalizer: Normalizer, precision: str, stats: tuple[str, ...]) -> Callable:
    """The forward kernel that gathers what these statistics are made of."""
    template = forward_rows.forward_general
    if normalizer.family == "threshold":
        template = forward_rows.forward_threshold
    elif _is_exponential(normalizer):
        template = forward_rows.forward_exponential
    return template_kernel(normalizer, precision, template, **statistics_flags(stats))


@cache_by_normalizer
def finish_kernel(normalizer: Normalizer, stats: tuple[str, ...]) -> tuple[Callable, np.ndarray]:
    """The kernel that turns sums into statistics, and its argument `wanted`."""
    family = "exponential" if _is_exponential(normalizer) else normalizer.family
    functions = dict(
        sharpness=getattr(families, f"{family}_sharpness"),
        statistics=tuple(one.finish for one in DEFINITIONS.values()),
        finish_shift=families.threshold_finish_shift if family == "threshold" else families.plain_finish_shift,
    )
    wanted = np.array([NAMES.index(name) for name in stats])
    return template_kernel(normalizer, "float64", families.finish_rows, **functions), wanted


@cache_by_normalizer
def backward_kernel(normalizer: Normalizer, precision: str, stat_gradients: bool, theta_gradient: bool) -> Callable:
    """The backward kernel of whole rows, with the gradients of statistics and of a parameter per row if asked for."""
    flags = dict(stat_gradients=stat_gradients, theta_gradient=theta_gradient)
    return template_kernel(normalizer, precision, backward_rows.backward_whole, **flags)


@cache_by_normalizer
def part_kernel(normalizer: Normalizer, precision: str) -> Callable:
    """The backward kernel of a part of the keys, where the whole row's m, Z and δ are known."""
    return template_kernel(normalizer, precision, backward_rows.backward_part, stat_gradients=False)


def template_kernel(normalizer: Normalizer, precision: str, template: FunctionType, **flags: Any) -> Callable:
    """A template compiled with the normaliser's functions and these flags."""
    return kernel(template, {**tile_functions(normalizer, precision), **flags}, precision)


def tile_functions(normalizer: Normalizer, precision: str) -> dict[str, Any]:
    """The functions (x, m, c, θ) that the templates call, and the constants that they know of the family."""
    family, limits = normalizer.family, np.finfo(precision)
    is_threshold = family == "threshold"
    shift, rest = getattr(normalizer, "shift", "none"), getattr(normalizer, "rest", nothing)
    found = dict(
        is_ratio=family == "ratio",
        is_coupled=family != "pointwise",
        is_sparse=normalizer.sparse,
        is_difference=isinstance(normalizer, Ratio) and normalizer.differs,
        is_power=isinstance(normalizer, Threshold) and normalizer.is_power,
        is_shifted=shift != "none",
        lowest_shift=0.0 if shift == "max0" else float("-inf"),
        has_rest=_is_exponential(normalizer) and rest is not nothing,
        lowest=float(np.log(limits.tiny)) - 20.0,  # its exp is 0
        smallest=float(limits.tiny),
        largest=float(limits.max),
        lanes=512 // limits.bits,
        order=getattr(normalizer, "order", 0),
        rest=rest,
        row_shift=backward_rows.threshold_row_shift if is_threshold else backward_rows.plain_row_shift,
        excess=families.threshold_excess,
        parameter_slope=families.no_parameter_slope,
    )
    for name in OF_FAMILY:
        found[name] = getattr(families, f"{family}_{name}")
    for name in OWN:
        if getattr(normalizer, name, None) is not None:
            found[name] = getattr(normalizer, name)
    return found


def _is_exponential(normalizer: Normalizer) -> bool:
    return isinstance(normalizer, Ratio) and normalizer.exponential
