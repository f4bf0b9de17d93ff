"""The YaRN factor: q and k are multiplied by 0.1·ln s + 1 once each, or the logits are off by its square.

‖q of the call‖ / ‖output of its projection‖ is that factor, because a rotation keeps lengths; 1/√d may be in it.
"""

from __future__ import annotations

from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.configuration import layer_config
from regard.health.probe.projections import capture_inside, length_ratio
from regard.health.probe.trial import Trial
from regard.table import format_number

OFF = 5e-3
RULES = (
    Rule(
        "RG411", "YaRN factor is not the configured one",
        "YaRN's attention factor multiplies q and k exactly once", "warning",
        "token ids and a config with YaRN or LongRoPE",
        "q or k is longer or shorter than its projection by another factor than the configuration asks",
        "The factor is applied twice (in cos and sin and in the scale) or was dropped.",
        "Multiply cos and sin by the attention factor once, and leave the scale of the scores alone.",
        ("arXiv 2309.00071", "transformers#46634"),
        explains=("RG24", "RG301", "RG302", "RG303", "RG401", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
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
        RULES[0], "warning", [key for key, *_ in found],
        f"{name} is multiplied by {format_number(used)} on its way to the scores, where the configured factor is "
        f"{format_number(wanted)} (first in {key[0]}).{twice}",
        f"relative difference > {OFF:g}",
    )  # fmt: skip
