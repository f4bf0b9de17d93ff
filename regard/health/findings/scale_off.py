"""Scale off: the logit variance of a layer is far from 1, and its q and k norms times the scale say the same.

With q and k of unit variance, q·k has variance d and the scale 1/√d makes it 1. Training moves it; what is held
against a layer is the median over its heads of both the measured variance and the one that the norms alone predict,
scale²·E‖q‖²·E‖k − k̄‖²/d: single heads may be sharp because their directions agree, but a layer whose norms alone
make variance 8 softens nothing, and one under 1/32 cannot choose. One head alone is off from 256 on, in both. A
healthy trained encoder (MiniLM) has 0.4 to 2.6.
"""

from __future__ import annotations

from statistics import median

from regard.health.findings._finding import finding, free_heads

KIND = "scale off"
HIGH, LOW = 8.0, 1.0 / 32.0
ALONE = 256.0  # a single head, where its layer is in order: a standard deviation of 16; MiniLM has one at 8


def find(heads):
    layers = {}
    for head in heads:
        if not head.can_be_judged:
            continue
        layers.setdefault(head.index, []).append(head)
    high, low, alone = [], [], []
    for members in layers.values():
        measured = median(head.statistics.mean("logit_variance") for head in members)
        known = [head.predicted_variance for head in members if head.predicted_variance == head.predicted_variance]
        predicted = median(known) if known else measured  # a what-if has no norms of its own
        numbers = [(head, head.statistics.mean("logit_variance")) for head in members]
        if min(measured, predicted) > HIGH:
            high += numbers
        elif max(measured, predicted) < LOW:
            low += numbers
        else:
            alone += [(head, number) for head, number in numbers if min(number, head.predicted_variance) > ALONE]
    if alone:
        free = {id(head) for head in free_heads(heads)}
        high += [(head, number) for head, number in alone if id(head) in free]
    threshold = (
        "median over a layer's heads of logit_variance and of scale²·E‖q‖²·E‖k − k̄‖²/d, "
        f"both > {HIGH:g} or < 1/32, or of one head > {ALONE:g} (theory: 1)"
    )
    told = "The logits' variance is {range} where 1/√d aims at 1, and the norms of q and k predict it: "
    return [
        *finding(
            KIND,
            "warning",
            high,
            told + "too large a scale.",
            threshold,
            "Check that scores are multiplied by 1/√d exactly once; try what_if=['scale=sqrt', 'qk_norm', "
            "'temperature=4'].",
        ),
        *finding(
            KIND,
            "warning",
            low,
            told + "too small a scale.",
            threshold,
            "Check that scores are not divided twice (1/d for 1/√d); try what_if=['scale=sqrt', 'temperature=0.5'], or "
            "larger initial query and key weights.",
        ),
    ]
