"""Checks of `Monitor`'s arguments."""

from __future__ import annotations

import numbers
from typing import Any

from torch import nn

from regard.health.capture.interception import refuse_data_parallel

METRICS = ("max_logit",)  # what `metrics` may name


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    refuse_data_parallel(model)
    if model._compiled_call_impl is not None:
        raise ValueError(
            "model was compiled in place, which skips its hooks; pass the module that torch.compile(model) returns"
        )


def check_options(every: Any, budget: Any, sequences: Any, metrics: Any, on_alarm: Any) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be an int ≥ 1, got {every!r}")
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not (number and 0.0 < budget <= 1.0):
        raise ValueError(f"budget must be a number in (0, 1], got {budget!r}")
    if sequences is not None and (isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 1):
        raise ValueError(f"sequences must be an int ≥ 1, or None for all, got {sequences!r}")
    if metrics is not None and tuple(metrics) != METRICS:
        raise ValueError(f"metrics must be None for all, or {METRICS}, got {metrics!r}")
    if on_alarm is not None and not callable(on_alarm):
        raise TypeError(f"on_alarm must be a function that takes an Alarm, got {type(on_alarm).__name__}")
