"""Checks of `Monitor`'s arguments."""

import numbers
from typing import Any

from regard.health.capture.interception import check_model

METRICS = ("max_logit",)  # what `metrics` may name


def check_arguments(
    model: Any, every: Any, budget: Any, sequences: Any, metrics: Any, on_alarm: Any, on_failure: Any, timeout: Any,
    text: Any, tokenizer: Any,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError for what a monitor cannot work with."""
    check_model(model)
    if not _is_count(every):
        raise ValueError(f"every must be an int ≥ 1, got {every!r}")
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not (number and 0.0 < budget <= 1.0):
        raise ValueError(f"budget must be a number in (0, 1], got {budget!r}")
    if sequences is not None and not _is_count(sequences):
        raise ValueError(f"sequences must be an int ≥ 1, or None for all, got {sequences!r}")
    if metrics is not None and tuple(metrics) != METRICS:
        raise ValueError(f"metrics must be None for all, or {METRICS}, got {metrics!r}")
    if on_failure not in ("alone", "stop"):
        raise ValueError(f'on_failure must be "alone" or "stop", got {on_failure!r}')
    if not (isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0):
        raise ValueError(f"timeout must be a number of seconds > 0, got {timeout!r}")
    if text and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError("text=True needs tokenizer=, an object with decode")
    if on_alarm is not None and not callable(on_alarm):
        raise TypeError(f"on_alarm must be a function that takes an Alarm, got {type(on_alarm).__name__}")


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1
