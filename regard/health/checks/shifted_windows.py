"""Shifted windows: patches that a cyclic shift brings round the image's edge must not see those of the other edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.health.capture.call import Call
from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.library import is_library_code
from regard.health.probe.probe import Key
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG733", "windows reach round the edge", "shifted windows hide what came round the edge", "warning",
    "images, and attention in windows of a tensor that torch.roll shifted along two axes",
    "attention runs in windows of a shifted image, and every window has the same mask: those at the edge hold patches "
    "of opposite sides; it is right for a torus alone",
    "The mask of shifted windows is missing, or was made before the image was padded.",
    "Number the regions of the shifted image, and hide keys whose region is not the query's.",
    ("arXiv 2103.14030", "pytorch-image-models#2438"),
)  # fmt: skip
RULES = (RULE,)


class Rolls(TorchFunctionMode):
    """Adds up the shifts of torch.roll along two axes or more."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.roll, Tensor.roll):
            shifts = args[1] if len(args) > 1 else kwargs.get("shifts")
            dims = args[2] if len(args) > 2 else kwargs.get("dims")
            if isinstance(shifts, (tuple, list)) and isinstance(dims, (tuple, list)) and len(dims) > 1:
                for dim, shift in zip(dims, shifts, strict=True):
                    self.shifts[dim] = self.shifts.get(dim, 0) + int(shift)
        return func(*args, **kwargs)

    @property
    def is_shifted(self) -> bool:
        return sum(shift != 0 for shift in self.shifts.values()) > 1


def check(trial: Trial) -> list:
    if trial.batches or not trial.captured[1]:
        raise NothingToCheck("the model has no attention to images")
    rows, shifted, open_windows = len(trial.sample.ids), 0, []
    rolls = Rolls()

    def look(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        nonlocal shifted
        if rolls.is_shifted and call.q.shape[0] > rows:
            shifted += 1
            mask = call.mask
            if mask is None or bool((mask == mask[:1]).all()):
                open_windows.append(key)
        return run()

    with rolls:
        trial.probe.run(trial.sample, look)
    if not shifted:
        raise NothingToCheck("no attention runs in shifted windows")
    if not open_windows:
        return []
    text = f"In {len(open_windows)} of {shifted} layers of shifted windows no mask tells the windows at the edge apart"
    severity = "note" if is_library_code(trial.model) else "warning"
    return trial.find(RULE, severity, open_windows, f"{text} (first {open_windows[0][0]}).")
