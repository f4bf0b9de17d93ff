"""Calls of the model on one repeated token: what differs between places there is due to positions alone.

A causal or bidirectional layer whose weights add up to 1 returns the same vector everywhere, so that this holds in
every layer and not in the first alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.health.probe.probe import CapturedCall, Key
from regard.health.tokens.text import TokenBatch

if TYPE_CHECKING:
    from regard.health.probe.trial import Trial

LENGTH = 48  # tokens


def repeat_one_token(trial: Trial) -> TokenBatch:
    """A batch of one sequence whose tokens are all the same, without padding, at positions 0, 1, 2, …"""
    short = trial.tokens.cut(1, LENGTH)
    token = most_usual_token(short.targets, trial.pad)

    def fill(x: Tensor) -> Tensor:
        return torch.full_like(x, token)

    same = short.with_ids(fill(short.ids))
    same = same.with_targets(fill(same.targets)) if same.has_decoder else same
    length = same.ids.shape[1]
    named = dict(same.named)
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.shape != same.ids.shape or name in (same.key, same.decoder):
            continue
        if "mask" in name:
            named[name] = torch.ones_like(x)
        elif name == "position_ids":
            named[name] = torch.arange(length, device=x.device).expand_as(x).contiguous()
        elif name == "token_type_ids":
            named[name] = torch.zeros_like(x)
    named.pop("labels", None)
    return TokenBatch(same.args, named, same.key, None)


def most_usual_token(ids: Tensor, pad: int | None) -> int:
    """A token from the middle of the text that is not padding."""
    usable = ids[ids != pad] if pad is not None and bool((ids != pad).any()) else ids.flatten()
    return int(usable[len(usable) // 2])


def capture_repeated(trial: Trial) -> dict[Key, CapturedCall]:
    """The attention calls on one repeated token; captured once for each trial."""
    kept = trial.__dict__.get("_repeated")
    if kept is None:
        kept = trial.__dict__["_repeated"] = trial.probe.capture(repeat_one_token(trial))[1]
    return kept
