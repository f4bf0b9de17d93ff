"""Rotary positions are not the configured ones: another base, fraction or scaling, recovered from q and k themselves.

With one token repeated, q and k of every layer depend on the position through the rotation alone, so that the angle of
each pair per position is a linear fit. It is compared with the angles of the configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.configuration import LayerConfig, expected_angles, layer_config
from regard.health.probe.probe import Key
from regard.health.probe.rotation import (
    HALVES,
    INTERLEAVED,
    Rotation,
    depends_on_position,
    fit_base,
    recover_rotation,
    rotate,
)  # fmt: skip
from regard.health.probe.texts import capture_repeated
from regard.health.probe.trial import Trial
from regard.table import format_number

ANGLE = 1e-3  # rad over the whole text by which angles may differ from the configured ones, relative to the vector
RULES = (
    Rule(
        "RG416", "rotary positions are not the configured ones",
        "rotary positions have the base, fraction and scaling of the configuration", "warning",
        "token ids and a config with rotary positions",
        "q and k of the call turn by other angles per position than the configuration says; it does not tell which of "
        "the two the weights were trained with",
        "The base, the scaling type or the rotated fraction of the configuration is ignored, applied twice, or the "
        "buffer of inverse frequencies was cast or not initialised.",
        "Make inv_freq from the configuration in float32, and scale it once; compare it with the library's.",
        ("transformers#46634", "vllm#48621"), explains=("RG24", "RG310", "RG405", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    """Compares the recovered angles of every layer with the configured ones."""
    calls = capture_repeated(trial)
    wrong: dict[str, list[Key]] = {}
    judged = 0
    for key, one in calls.items():
        config = layer_config(trial, one)
        if config is None or one.q.shape[2] != one.k.shape[2] or one.call.is_cross(key[0]):
            continue
        wanted = expected_angles(config, one.q.shape[-1], one.q.shape[2])
        if not wanted or not depends_on_position(one.k[0]):
            continue  # a layer without positions is judged by `positions_missing`
        judged += 1
        for part in (one.q, one.k):
            if text := describe_difference(part[0], wanted, config):
                wrong.setdefault(text, []).append(key)
                break
    if not judged:
        raise NothingToCheck("no layer with a configured rotary base turns its keys by position")
    if not wrong:
        return []
    texts = [f"{text} ({len(keys)} layers, first {keys[0][0]})" for text, keys in wrong.items()]
    keys = [key for group in wrong.values() for key in group]
    return trial.find(
        RULES[0], "warning", keys, ". ".join(texts[:4]) + ".",
        f"a pair that turns away from its configured place by more than {ANGLE:g} of the vector's length",
    )  # fmt: skip


def describe_difference(x: Tensor, wanted: list[Tensor], config: LayerConfig) -> str:
    """What differs between the rotation of x [H, N, D] and the configured angles; nothing if it fits or is no rotation.

    Angles may turn either way, and pairs lie in halves or side by side, in the first or in the last numbers.
    """
    x = x.double().cpu()
    if any(is_turned_by(x, angles) for angles in wanted):
        return ""
    found = recover_rotation(x)
    return "" if found is None else describe_angles(found, wanted[0], config)


def is_turned_by(x: Tensor, angles: Tensor) -> bool:
    """True if x, turned back by these angles, is the same at every position."""
    width, size = 2 * len(angles), x.norm(dim=-1).amax().clamp_min(1e-30)
    if width > x.shape[-1]:
        return False
    for pairing in (HALVES, INTERLEAVED):
        for first in {0, x.shape[-1] - width}:
            for sign in (1.0, -1.0):
                back = rotate(x, sign * angles, pairing, first, step=-1.0)
                if float((back - back[:, :1]).norm(dim=-1).amax() / size) < ANGLE:
                    return True
    return False


def describe_angles(found: Rotation, wanted: Tensor, config: LayerConfig) -> str:
    """The recovered law beside the configured one, in a sentence without its full stop."""
    angles = found.angles.abs()
    base = config.rope.get("rope_theta")
    if len(angles) != len(wanted) and angles.amax() > 0.5:
        return f"Rotary positions turn {found.width} numbers of a head, where the configuration says {2 * len(wanted)}"
    if len(angles) == len(wanted):
        ratio = (angles / wanted)[wanted > 1e-4]
        if len(ratio) and float(ratio.max() / ratio.min()) < 1.01 and abs(float(ratio.mean()) - 1) > 1e-3:
            times = format_number(float(ratio.mean()))
            return f"Rotary positions advance {times} for every 1 of the configuration ({config.rope_type} scaling)"
        if config.rope_type != "default":
            plain = fit_base(angles)
            if plain is not None and isinstance(base, (int, float)) and abs(plain[0] / base - 1) < 0.05:
                return (
                    f"Rotary positions have the plain base {format_number(plain[0])}: the configured "
                    f"{config.rope_type!r} scaling is not applied"
                )
    law = fit_base(angles)
    if law is not None:
        return (
            f"Rotary positions have the base {format_number(law[0])}, where the configuration says "
            f"{format_number(float(base))}"  # type: ignore[arg-type]
        )
    share = float((angles - wanted).abs().max()) if len(angles) == len(wanted) else torch.nan
    return f"Rotary angles differ from those of the configuration by up to {share:.2g} rad per position"
