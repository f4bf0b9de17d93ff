"""The soft cap c·tanh(s/c) of the configuration is not in the call, or another one is."""

from __future__ import annotations

import torch

from regard._call.scores import resolve_scale, soft_cap
from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.configuration import layer_config
from regard.health.probe.probe import CapturedCall
from regard.health.probe.trial import Trial
from regard.table import format_number

NAMES = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
EFFECT = 1e-3  # change of a logit from which on two caps can be told apart
RULES = (
    Rule(
        "RG412", "soft cap is not the configured one",
        "the configured soft cap bounds the scores", "warning",
        "token ids and a config with a soft cap",
        "the call's scores are not capped as the configuration says",
        "The attention kernel has no soft cap and dropped it without a word.",
        "Use an implementation with a soft cap: eager, flex, flash-attention 2.6 or later, or regard.",
        ("arXiv 2408.00118", "transformers#31775"),
        explains=("RG23", "RG24", "RG301", "RG302", "RG303", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    found, judged = [], 0
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        named = None if config is None else config.number_of(*NAMES)
        if config is None or not any(hasattr(config.config, name) for name in NAMES):
            continue
        is_library = type(one.call.module).__module__.startswith("transformers.models.")
        if is_library and not any("cap" in name for name in vars(one.call.module)):
            continue  # its class has no cap, as a pooling head beside layers that have
        judged += 1
        wanted, used = None if named is None else named[1], used_cap(one)
        if wanted != used and not (wanted and used and abs(wanted / used - 1) < 1e-3):
            if one.call.kind != "by hand" or differs(one, wanted):
                found.append((key, wanted, used))
    if not judged:
        raise NothingToCheck("no soft cap is configured")
    if not found:
        return []
    key, wanted, used = found[0]
    return trial.find(
        RULES[0], "warning", [key for key, *_ in found],
        f"The scores are {'not capped' if used is None else f'capped at {format_number(used)}'}, where the "
        f"configuration says {'no cap' if wanted is None else format_number(wanted)} (first in {key[0]}).",
        "the call's soft cap, where one is configured",
    )  # fmt: skip


def used_cap(one: CapturedCall) -> float | None:
    cap = one.call.options.get("softcap")
    return float(cap) if cap else None


def differs(one: CapturedCall, cap: float | None) -> bool:
    """True if the followed logits, which hold a cap in their bias, are not those of this cap."""
    scale = resolve_scale(one.call.options.get("scale"), one.q.shape[-1])
    k = one.k.repeat_interleave(one.q.shape[1] // one.k.shape[1], 1)
    s = (scale * one.q @ k.transpose(-1, -2)).float()
    mask = one.call.mask
    logits = s if mask is None or mask.dtype == torch.bool else s + mask.float()
    off = (logits - soft_cap(s, cap)).masked_fill(~one.visible, 0.0).nan_to_num(0.0, 0.0, 0.0)
    return bool(off.abs().amax() > EFFECT)
