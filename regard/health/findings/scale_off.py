"""Scale off: the logit variance of a layer is far from 1, its q and k norms say the same, and softmax suffers.

With q and k of unit variance, q·k has variance d and the scale 1/√d makes it 1. Training moves it; what is held
against a layer is the median over its heads of the measured variance and of the one that the norms alone predict,
scale²·E‖q‖²·E‖k − k̄‖²/d: single heads may be sharp because their directions agree. Long training may carry a sound
layer past 8 in both, so variance is not the charge alone. Either the gradient gain is gone as well: sound models,
trained long, keep a median of 0.43 or more in every layer (a uniform row has 1), those without 1/√d fall below 0.25.
Or the norms alone explain the variance: in sound layers past 8 queries and keys agree, and it is 1.9 to 5 times what
the norms predict, while directions that know nothing of each other give 1. A layer under 1/32 cannot choose. One
head alone is off from 256 on, in both variances.
"""

from __future__ import annotations

from statistics import median

from regard.health.findings._finding import finding, free_heads

KIND = "scale off"
HIGH, LOW = 8.0, 1.0 / 32.0
GAIN = 0.3  # of a uniform row's: between the two
NORMS = 1.25  # variance over what the norms predict: up to here they alone made it
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
        gain = median(head.statistics.mean("gradient_gain") for head in members)
        known = [head.predicted_variance for head in members if head.predicted_variance == head.predicted_variance]
        predicted = median(known) if known else measured  # a what-if has no norms of its own
        by_norms = bool(known) and measured < NORMS * predicted
        numbers = [(head, head.statistics.mean("logit_variance")) for head in members]
        if min(measured, predicted) > HIGH and (gain < GAIN or by_norms):
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
        f"both > {HIGH:g} with a median gradient gain < {GAIN:g} or the one < {NORMS:g} × the other, or both < 1/32; "
        f"of one head > {ALONE:g} (theory: 1)"
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
