"""The call against the configuration: YaRN's factor, the soft cap, learned sinks, groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._call.scores import resolve_scale, soft_cap
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.configuration import layer_config
from regard.health.probe.probe import CapturedCall
from regard.health.probe.projections import capture_inside, length_ratio
from regard.health.probe.trial import Trial
from regard.table import format_number

OFF = 5e-3
YARN = Rule(
    "RG411", "YaRN factor is not the configured one",
    "YaRN's attention factor multiplies q and k exactly once", "warning",
    "token ids and a config with YaRN or LongRoPE",
    "q or k is longer or shorter than its projection by another factor than the configuration asks",
    "The factor is applied twice (in cos and sin and in the scale) or was dropped.",
    "Multiply cos and sin by the attention factor once, and leave the scale of the scores alone.",
    ("arXiv 2309.00071", "transformers#46634"),
    explains=("RG24", "RG301", "RG302", "RG303", "RG401", "RG8"),
)  # fmt: skip


def check_yarn(trial: Trial, rule: Rule) -> list:
    """‖q‖ / ‖output of its projection‖ is the factor, as a rotation keeps lengths; 1/√d may be in it."""
    found: list[tuple] = []
    judged = configured = 0
    inside = capture_inside(trial)
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        wanted = None if config is None else config.yarn_factor
        ratios = [(name, length_ratio(x, inside[key])) for name, x in (("q", one.q), ("k", one.k))]
        if wanted is None or config is None or config.number_of("qk_rope_head_dim"):
            continue
        configured += 1
        for name, ratio in ratios:
            if ratio is None:
                continue
            judged += 1
            d = one.q.shape[-1]
            if all(abs(ratio[1] / (wanted * known) - 1) > OFF for known in (1.0, d**-0.5, d**-0.25)):
                found.append((key, name, ratio[1], wanted))
    if not configured:
        raise NothingToCheck("no YaRN or LongRoPE is configured")
    if not judged:
        raise NotApplicable("q and k cannot be compared with their projections")
    if not found:
        return []
    key, name, used, wanted = found[0]
    twice = " It is applied twice." if abs(used / wanted**2 - 1) < OFF and wanted != 1 else ""
    return trial.find(
        rule, "warning", [key for key, *_ in found],
        f"{name} is multiplied by {format_number(used)} on its way to the scores, where the configured factor is "
        f"{format_number(wanted)} (first in {key[0]}).{twice}",
        f"relative difference > {OFF:g}",
    )  # fmt: skip


CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
EFFECT = 1e-3  # change of a logit from which on two caps can be told apart
SOFT_CAP = Rule(
    "RG412", "soft cap is not the configured one",
    "the configured soft cap bounds the scores", "warning",
    "token ids and a config with a soft cap",
    "the call's scores are not capped as the configuration says",
    "The attention kernel has no soft cap and dropped it without a word.",
    "Use an implementation with a soft cap: eager, flex, flash-attention 2.6 or later, or regard.",
    ("arXiv 2408.00118", "transformers#31775"),
    explains=("RG23", "RG24", "RG301", "RG302", "RG303", "RG8"),
)  # fmt: skip


def check_cap(trial: Trial, rule: Rule) -> list:
    found, judged = [], 0
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        named = None if config is None else config.number_of(*CAPS)
        if config is None or not any(hasattr(config.config, name) for name in CAPS):
            continue
        is_library = type(one.call.module).__module__.startswith("transformers.models.")
        if is_library and not any("cap" in name for name in vars(one.call.module)):
            continue  # its class has no cap, as a pooling head beside layers that have
        judged += 1
        wanted, used = None if named is None else named[1], used_cap(one)
        if wanted != used and not (wanted and used and abs(wanted / used - 1) < 1e-3):
            if one.call.kind != "by hand" or differs_by_cap(one, wanted):
                found.append((key, wanted, used))
    if not judged:
        raise NothingToCheck("no soft cap is configured")
    if not found:
        return []
    key, wanted, used = found[0]
    return trial.find(
        rule, "warning", [key for key, *_ in found],
        f"The scores are {'not capped' if used is None else f'capped at {format_number(used)}'}, where the "
        f"configuration says {'no cap' if wanted is None else format_number(wanted)} (first in {key[0]}).",
        "the call's soft cap, where one is configured",
    )  # fmt: skip


def used_cap(one: CapturedCall) -> float | None:
    cap = one.call.options.get("softcap")
    return float(cap) if cap else None


def differs_by_cap(one: CapturedCall, cap: float | None) -> bool:
    """True if the followed logits, which hold a cap in their bias, are not those of this cap."""
    scale = resolve_scale(one.call.options.get("scale"), one.q.shape[-1])
    k = one.k.repeat_interleave(one.q.shape[1] // one.k.shape[1], 1)
    s = (scale * one.q @ k.transpose(-1, -2)).float()
    mask = one.call.mask
    logits = s if mask is None or mask.dtype == torch.bool else s + mask.float()
    off = (logits - soft_cap(s, cap)).masked_fill(~one.visible, 0.0).nan_to_num(0.0, 0.0, 0.0)
    return bool(off.abs().amax() > EFFECT)


KINDS_WITHOUT = ("sdpa", "flash_attention", "flex_attention")
SINKS = Rule(
    "RG414", "sinks are not in the call",
    "learned sinks of a layer take part in its softmax", "warning",
    "token ids and layers with a parameter named sinks",
    "the layer holds a sink per head and its attention call was given none",
    "The attention function ignores `s_aux`, as kernels without sinks do.",
    "Use an implementation with sinks: eager, flash-attention 3 with s_aux, or regard.",
    ("transformers#40414", "arXiv 2508.10925"), explains=("RG23", "RG24", "RG308"),
)  # fmt: skip


def check_sinks(trial: Trial, rule: Rule) -> list:
    with_sinks = [(key, one) for key, one in trial.captured[1].items() if sink_of(one.call.module, one.q.shape[1])]
    if not with_sinks:
        raise NothingToCheck("no layer has a parameter for sinks")
    without = [key for key, one in with_sinks if one.call.options.get("sink") is None and one.call.kind != "by hand"]
    if not without:
        return []
    return trial.find(
        rule, "warning", without,
        f"{len(without)} of {len(with_sinks)} layers with learned sinks call attention without them (first "
        f"{without[0][0]}).",
        "a parameter named sink with one number per head, and no sink in the call",
    )  # fmt: skip


def sink_of(module: nn.Module, heads: int) -> str | None:
    """The name of the layer's own parameter with one sink per head."""
    own = module._parameters.items()
    return next((name for name, p in own if "sink" in name and p is not None and p.numel() == heads), None)


GROUP_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
GROUPS = Rule(
    "RG415", "key-value heads serve the wrong queries",
    "every group of query heads reads its own key-value head", "warning",
    "token ids and a config with fewer key-value heads than heads",
    "key-value heads repeat as a, b, a, b, where weights of grouped-query models expect a, a, b, b",
    "repeat was used where repeat_interleave is meant.",
    "Repeat with k.repeat_interleave(heads // kv_heads, dim=1), or pass enable_gqa=True.",
    ("arXiv 2305.13245", "keras#23038"),
)  # fmt: skip


def check_groups(trial: Trial, rule: Rule) -> list:
    tiled, judged = [], 0
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        groups = None if config is None else config.number_of(*GROUP_NAMES)
        heads = one.q.shape[1]
        if type(one.call.module).__module__.startswith("transformers.models."):
            continue  # its own code repeats as its weights were trained; `computes_otherwise` judges its functions
        if groups is None or one.k.shape[1] != heads or not 1 < groups[1] < heads or heads % int(groups[1]):
            continue
        judged += 1
        if any(is_tiled(x, int(groups[1])) for x in (one.k, one.v)):
            tiled.append((key, int(groups[1]), heads))
    if not judged:
        raise NothingToCheck("no call repeats key-value heads")
    if not tiled:
        return []
    key, few, heads = tiled[0]
    return trial.find(
        rule, "warning", [key for key, *_ in tiled],
        f"Query head i reads key-value head i mod {few}, where it is i // {heads // few} (first in {key[0]}).",
        "equal heads of k or v at a distance of the number of key-value heads, and not side by side",
    )  # fmt: skip


def is_tiled(x: Tensor, groups: int) -> bool:
    """True if heads of x [B, H, N, D] repeat as a, b, a, b and not as a, a, b, b."""
    each = x.shape[1] // groups
    as_tiles, as_runs = x.unflatten(1, (each, groups)), x.unflatten(1, (groups, each))
    tiles = bool((as_tiles == as_tiles[:, :1]).all())
    return tiles and not bool((as_runs == as_runs[:, :, :1]).all())


WAYS = ((YARN, check_yarn), (SOFT_CAP, check_cap), (SINKS, check_sinks), (GROUPS, check_groups))
RULES = tuple(rule for rule, _ in WAYS)


def check(trial: Trial) -> list:
    return trial.ask_each(WAYS)
