"""Checks of `Monitor`'s arguments."""

import numbers
from typing import Any

from regard.health.capture.interception import check_model

METRICS = ("max_logit",)  # what `metrics` may name


def check_arguments(model: Any, every: Any, budget: Any, sequences: Any, metrics: Any, on_alarm: Any) -> None:
    """Raises TypeError or ValueError for what a monitor cannot work with."""
    check_model(model)
    if model._compiled_call_impl is not None:
        raise ValueError(
            "model was compiled in place, which skips its hooks; pass the module that torch.compile(model) returns"
        )
    if not _is_count(every):
        raise ValueError(f"every must be an int ≥ 1, got {every!r}")
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not (number and 0.0 < budget <= 1.0):
        raise ValueError(f"budget must be a number in (0, 1], got {budget!r}")
    if sequences is not None and not _is_count(sequences):
        raise ValueError(f"sequences must be an int ≥ 1, or None for all, got {sequences!r}")
    if metrics is not None and tuple(metrics) != METRICS:
        raise ValueError(f"metrics must be None for all, or {METRICS}, got {metrics!r}")
    if on_alarm is not None and not callable(on_alarm):
        raise TypeError(f"on_alarm must be a function that takes an Alarm, got {type(on_alarm).__name__}")


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1
