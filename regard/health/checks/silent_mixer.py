"""Mixers that are not attention: one that adds nothing, is not finite, or forgets every token at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from regard.health.checks.finding import LAYERS, Finding, fill_finding
from regard.health.checks.rule import Rule
from regard.health.mixers import MixerReading

SILENT = Rule(
    "RG330", "silent mixer", "every token mixer adds to the residual", "warning", needs="a hybrid model's mixers",
    proves="Proves that the output of these mixers is zero beside their input on this text.",
    cause="An output projection of zeros: pruning, a wrong name in a weight conversion, or an untrained layer.",
    fix="Compare the output projection of these layers with the checkpoint's.",
    references=("transformers#45676",),
)  # fmt: skip
FORGETFUL = Rule(
    "RG331", "forgetful mixer", "recurrent mixers remember more than a token", "warning",
    needs="a hybrid model's mixers", proves="Proves that the state is emptied at every token on this text.",
    cause="A decay read with the wrong sign or without its bias, or a time step of the wrong scale.",
    fix="Check A_log, dt_bias and the order of the fused projection against the checkpoint.",
)  # fmt: skip
RULES = (SILENT, FORGETFUL)
NOTHING = 1e-6
EMPTY = 0.99
SMALL = f"root mean square of the output over that of the input at most {NOTHING:g}"
SHUT = f"{100 * EMPTY:g} % of the decays are below 0.01"


def find_in_mixers(mixers: Sequence[MixerReading]) -> list[Finding]:
    read = [one for one in mixers if one.is_read]
    numbers = {one.layer: one.numbers for one in read}
    silent = [one for one in read if numbers[one.layer]["output_rms"] <= NOTHING * numbers[one.layer]["input_rms"]]
    broken = [one for one in read if not math.isfinite(numbers[one.layer]["output_rms"])]
    empty = [one for one in read if numbers[one.layer].get("decay_shut", 0.0) >= EMPTY]
    return [
        *_make(SILENT, "warning", silent, "The output of {mixers} is 0: {they} add nothing to the residual.", SMALL),
        *_make(SILENT, "critical", broken, "The output of {mixers} is not finite.", "NaN or infinite"),
        *_make(FORGETFUL, "warning", empty, "The state of {mixers} is emptied at every token.", SHUT),
    ]


def _make(rule: Rule, severity: str, found: Sequence[MixerReading], evidence: str, threshold: str) -> list[Finding]:
    if not found:
        return []
    listed = ", ".join(one.layer for one in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    words = dict(mixers=f"{found[0].kind} {listed}", they="they" if len(found) > 1 else "it")
    said = evidence.format(**words)
    return [fill_finding(rule, severity, (), said, threshold, scope=LAYERS, layer=found[0].layer)]
