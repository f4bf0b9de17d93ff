"""One application of QK-clip: from the observed largest logits to the weights, and what it did."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.health.capture.interception import as_written, check_model
from regard.health.qk_clip.max_logits import MaxLogits
from regard.health.qk_clip.weights import Masters, holders_of, select_projections, tensors_to_shrink
from regard.nn.projections import NotFound, bounded_scores_reason, projections


class Clip(NamedTuple):
    """One head that was clipped: its largest logit, and the factor that brought it to the threshold."""

    layer: str
    head: int
    max_logit: float
    factor: float


class Clipped:
    """What a call of `qk_clip` did, read from the device only on request.

    `heads`: the heads that were clipped, or would be with `log_only`; `max_logit`: layer → the largest logit of each
    head; `skipped`: layer → why its weights are not clipped; `applied`: False with `log_only`.
    """

    def __init__(self, applied: bool = True) -> None:
        self.applied = applied
        self.skipped: dict[str, str] = {}
        self.has_projections = False  # were the linear layers of any layer's queries and keys found?
        self._found: dict[str, tuple[Tensor, Tensor | None]] = {}  # layer -> largest logits, factors

    @property
    def max_logit(self) -> dict[str, list[float]]:
        return {name: largest.tolist() for name, (largest, _) in self._found.items()}

    @property
    def heads(self) -> list[Clip]:
        found = []
        for name, (largest, factors) in self._found.items():
            for head, factor in enumerate([] if factors is None else factors.tolist()):
                if factor < 1.0:
                    found.append(Clip(name, head, largest[head].item(), factor))
        return found

    def scalars(self) -> dict[str, float]:
        """Returns the largest logit over the model and per layer, and the number of clipped heads, by series name."""
        tops = [max(heads, default=-math.inf) for heads in self.max_logit.values()]
        found = {f"attention/layer_{at:02}/max_logit": top for at, top in enumerate(tops)}
        return found | {"attention/max_logit": max(tops, default=math.nan), "attention/clipped_heads": len(self.heads)}

    def __repr__(self) -> str:
        return f"Clipped(heads={self.heads}, skipped={self.skipped})"


def check_arguments(model: Any, threshold: Any) -> None:
    """Raises TypeError or ValueError for what `qk_clip` and `QKClip` cannot work with."""
    check_model(model)
    is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not (is_number and 0 < threshold < math.inf):
        raise ValueError(f"threshold must be a positive, finite number, got {threshold!r}")


def clip_observed(
    model: nn.Module,
    observer: MaxLogits,
    threshold: float,
    *,
    group: Any = None,
    names: tuple[str, str] | None = None,
    masters: Masters | None = None,
    log_only: bool = False,
) -> Clipped:
    """Shrinks the weights of every head whose largest logit since the last call passed the threshold.

    masters: finds the float32 copy that an optimizer keeps of a parameter, to be shrunk with it.
    """
    observer.read_modules()
    modules, holders = dict(as_written(model).named_modules()), holders_of(model)
    result = Clipped(applied=not log_only)
    for name, largest in observer.take(model, group).items():
        if name not in modules:  # it was removed from the model
            continue
        factors = None
        try:
            query, key = projections(modules[name], *observer.shapes[name], names)
            result.has_projections = True
            tensors = tensors_to_shrink(select_projections(query, key), holders, modules[name], masters)
        except NotFound as reason:
            result.skipped[name] = str(reason)
        else:
            factors = torch.where(largest.isfinite() & (largest > threshold), threshold / largest, 1.0)
            for tensor in () if log_only else tensors:
                tensor.shrink(factors)
        result._found[name] = largest, factors
    result.skipped |= observer.unseen
    observer.unseen.clear()
    for name in (observer.regard_modules.keys() & modules.keys()) - result._found.keys():
        if (why := bounded_scores_reason(modules[name])) is not None:
            result.skipped[name] = why
    observer.mark_weights(model)
    return result
