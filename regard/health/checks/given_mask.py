"""The batch's own 4-D mask against the keys that are seen: a layer that shows what it hides ignores it."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.trial import Trial

HIDES = -1e3  # an additive entry at or below it hides
RULES = (
    Rule(
        "RG430", "given mask is ignored", "layers hide what the batch's own mask hides", "critical",
        "a mask [B, 1, N, N] in the batch",
        "a layer shows keys that the batch's mask hides, whether its True means visible or hidden",
        "The mask was replaced by one that the model makes itself, or lost by a kernel that takes none.",
        "Pass the mask on to every attention call, or use an implementation that takes it.",
        ("transformers#35896",), explains=("RG102", "RG111", "RG202"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    length = trial.tokens.targets.shape[1]
    masks = {
        name: x
        for name, x in trial.tokens.named.items()
        if "mask" in name and isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == (length, length)
    }
    if not masks:
        raise NothingToCheck("the batch holds no mask [B, 1, N, N]")
    name, given = next(iter(masks.items()))
    calls = {
        key: one
        for key, one in trial.captured[1].items()
        if one.q.shape[2] == one.k.shape[2] == length and not one.call.is_cross(key[0])
    }
    shown = {key: min(count_shown(one.visible, hidden) for hidden in readings_of(given)) for key, one in calls.items()}
    wrong = [key for key, share in shown.items() if share > 0]
    if not wrong:
        return []
    text = f"{len(wrong)} of {len(calls)} layers (first {wrong[0][0]}) show {shown[wrong[0]]:.0%} of the keys"
    return trial.find(RULES[0], "critical", wrong, f"{text} that {name} hides.", "any key shown that the mask hides")


def readings_of(mask: Tensor) -> list[Tensor]:
    """What a mask hides, by each meaning that it may have."""
    if mask.is_floating_point() and bool((mask <= HIDES).any()):
        return [mask <= HIDES]
    return [mask == 0, mask != 0]


def count_shown(visible: Tensor, hidden: Tensor) -> float:
    """The share of the hidden entries that are visible."""
    shape = torch.broadcast_shapes(visible.shape, hidden.shape)
    both = visible.expand(shape) & hidden.expand(shape)
    return float(both.sum()) / max(float(hidden.expand(shape).sum()), 1.0)
