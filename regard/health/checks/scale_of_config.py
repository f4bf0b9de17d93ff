"""The scale of the scores is not the one that the configuration names, or, in code written by hand, not 1/√d.

The effective scale is the call's own times the factors by which q and k were multiplied after their projections.
"""

from __future__ import annotations

from torch import Tensor

from regard._call.scores import resolve_scale
from regard.health.checks.distance_bias import last_bias
from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.configuration import LayerConfig, layer_config, yarn_scale
from regard.health.probe.probe import CapturedCall, Key
from regard.health.probe.projections import Inside, capture_inside, length_ratio
from regard.health.probe.trial import Trial
from regard.table import format_number

OFF = 5e-3  # relative difference of two scales
BY_HAND = Rule(
    "RG421", "scale of another formula", "scores that are computed by hand are divided by √d", "warning",
    "token ids, and attention whose class is of no library",
    "the scale of the calls, times what multiplied q and k after their projections, is exactly 1, √d, 1/d, or 1/√width "
    "of the model; weights that hold the factor, or a model that was trained so, work all the same",
    "1/√d is missing, multiplied for divided, or taken of the model's width.",
    "Divide the scores by √d of one head.", explains=("RG301", "RG302", "RG303", "RG306", "RG401", "RG402"),
)  # fmt: skip
MUP = "1/d, as muP asks; others divide by √d"
LIBRARIES = ("transformers.", "torch.", "regard.", "diffusers.", "timm.", "x_transformers.", "flash_attn.")
RULES = (
    Rule(
        "RG410", "scale is not the configured one",
        "scores are multiplied by the scale that the configuration names", "warning",
        "token ids and a config that names a scale",
        "the call's scale, times what multiplied q and k before it, is not the value of the configuration",
        "The scale of another model's attention was kept (1/√d), or a factor is applied twice or not at all.",
        "Pass the configured scale to the attention function, exactly once.",
        ("transformers#46634", "arXiv 2408.00118"),
        explains=("RG24", "RG301", "RG302", "RG303", "RG306", "RG401", "RG8"),
    ),
    BY_HAND,
)  # fmt: skip


def check(trial: Trial) -> list:
    wrong: dict[str, list[Key]] = {}
    judged = 0
    inside = capture_inside(trial)
    by_hand = check_by_hand(trial, inside)
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        named = None if config is None else configured_scale(config, one)
        used = effective_scale(one, inside[key])
        if named is None or used is None:
            continue
        judged += 1
        if abs(used / named[1] - 1) > OFF:
            times = format_number(used / named[1])
            text = (
                f"The scale of the scores is {format_number(used)}, which is {times} times {format_number(named[1])}, "
                f"the value of {named[0]}"
            )
            wrong.setdefault(text, []).append(key)
    if not judged and not by_hand:
        raise NothingToCheck("the configuration names no scale, or the scale is learned")
    if not wrong:
        return by_hand
    texts = [f"{text} ({len(keys)} layers, first {keys[0][0]})" for text, keys in wrong.items()]
    keys = [key for group in wrong.values() for key in group]
    return by_hand + trial.find(
        RULES[0], "warning", keys, ". ".join(texts[:4]) + ".", f"relative difference of the scales > {OFF:g}"
    )


def check_by_hand(trial: Trial, inside: dict[Key, Inside]) -> list:
    """Scales of calls of the user's own classes that are 1, √d or 1/√width of the model."""
    found: list[tuple[Key, str]] = []
    for key, one in trial.captured[1].items():
        heads, d = one.q.shape[1], one.q.shape[-1]
        ratios = [length_ratio(x, inside[key]) for x in (one.q, one.k)]
        scale = resolve_scale(one.call.options.get("scale"), d)
        if f"{type(one.call.module).__module__}.".startswith(LIBRARIES) or isinstance(scale, Tensor) or heads < 2:
            continue
        if None in ratios or layer_config(trial, one) is not None:
            continue  # a norm or another map lies between the projection and the call, or a configuration says more
        used = float(scale) * ratios[0][1] * ratios[1][1]  # type: ignore[index]
        names = {"√d": d**0.5, "1/√width of the model": (heads * d) ** -0.5}
        names[MUP] = 1 / d
        if last_bias(one) is None:  # beside a relative bias T5 and its kin leave the scale at 1
            names["1: they are not divided by √d"] = 1.0
        name = next((name for name, known in names.items() if abs(used / known - 1) < OFF), None)
        if name is not None and d > 1:
            found.append((key, name))
    if not found:
        return []
    (key, name), d = found[0], trial.captured[1][found[0][0]].q.shape[-1]
    text = f"The scale of the scores is {name} (d = {d}, {len(found)} layers, first {key[0] or 'the model itself'})."
    severity = "note" if found[0][1] == MUP else "warning"
    return trial.find(BY_HAND, severity, [key for key, _ in found], text, f"relative difference < {OFF:g}")


def configured_scale(config: LayerConfig, one: CapturedCall) -> tuple[str, float] | None:
    """(name of the entry, scale of the scores) where the configuration names one."""
    d = one.q.shape[-1]
    if found := config.number_of("query_pre_attn_scalar"):
        return f"{found[0]}={format_number(found[1])}", found[1] ** -0.5
    if found := config.number_of("attention_multiplier"):
        return found
    rope = config.rope
    if config.number_of("qk_nope_head_dim") and config.rope_type == "yarn" and rope.get("mscale_all_dim"):
        factor = yarn_scale(rope["factor"], rope["mscale_all_dim"]) ** 2
        return f"1/√{d} times mscale² = {format_number(factor)}", d**-0.5 * factor
    return None


def effective_scale(one: CapturedCall, inside: Inside) -> float | None:
    """The call's scale times what multiplied q after its projection; None where it is learned or per head."""
    scale = resolve_scale(one.call.options.get("scale"), one.q.shape[-1])
    if isinstance(scale, Tensor):
        return None
    ratio = length_ratio(one.q, inside)
    return float(scale) * (1.0 if ratio is None else ratio[1])
