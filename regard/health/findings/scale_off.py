"""Scale off: the logit variance of a layer is far from 1, its q and k norms say the same, and softmax suffers.

With q and k of unit variance, q·k has variance d and the scale 1/√d makes it 1. Training moves it; what is held
against a layer is the median over its heads of the measured variance and of the one that the norms alone predict,
scale²·E‖q‖²·E‖k − k̄‖²/d: single heads may be sharp because their directions agree. Training carries sound layers past
8 in both, so variance is not the charge alone. Either the gradient gain is gone as well, or the norms alone explain the
variance, as in a model that was just made: where queries and keys have learned to agree it is 1.3 times what the norms
predict, and more. Heads of 8 and 16 are too narrow for that, 1/√d or not.

How much must be gone depends on the scale of the call. Where it is 1/√d, sound layers were seen to keep 0.1 of a
uniform row's gain (benchmarks/sound_models.py), and less than 0.05 is asked for. Where it is larger there is a suspect:
less than 0.3 is enough, which those without 1/√d come to, and a variance of 4. A layer under 1/32 cannot choose: a note
where the scale is not small, as fresh models of small weights begin so. One head alone is off from 256 on, in both
variances. And all layers are off together where every one of them has both variances above 16 and a gain under 0.6:
the first layer of sound models stays below 9 or keeps its gain, whatever the others learned. Where it is less, but
above 3 in every layer, and the scale is large, nobody can see whether 1/√d is in the queries: a note asks.
"""

from __future__ import annotations

from statistics import median

from regard.health.findings._finding import finding, free_heads
from regard.health.findings._variance import LARGE, NORMS, by_layer, by_norms, variances

KIND = "scale off"
AIM = 1.0  # a head on the other side of it than its layer's median is not told as too large, or too small
HIGH, LOW = 8.0, 1.0 / 32.0
GAIN, SUSPECTED = 0.05, 0.3  # of a uniform row's; where the scale is LARGE the second, and half of HIGH
EVERYWHERE, KEPT = 16.0, 0.6  # variance and gain that, passed in every layer, no sound model has
WIDE = 32  # heads from which on it tells something that the norms explain the variance
ASKED = 3.0  # variance in every layer from which on a large scale is asked about
ALONE = 256.0  # a single head, where its layer is in order: a standard deviation of 16; MiniLM has one at 8


def find(heads):
    high, low, alone, asked = [], [], [], []
    layers = by_layer(heads)
    all_of_them = len(layers) > 1 and all(map(is_high, layers))
    doubtful = all(members[0].scale > LARGE and min(variances(members)) > ASKED for members in layers)
    for members in layers:
        measured, predicted = variances(members)
        numbers = [(head, head.statistics.mean("logit_variance")) for head in members]
        limit = HIGH / 2 if members[0].scale > LARGE else HIGH
        if all_of_them or (min(measured, predicted) > limit and suffers(members)):
            high += [one for one in numbers if one[1] > AIM]
            continue
        if doubtful:
            asked += [one for one in numbers if one[1] > AIM]
            continue
        if max(measured, predicted) < LOW:
            low += [one for one in numbers if one[1] < AIM]
        if telling(members[0]):
            alone += [(head, number) for head, number in numbers if min(number, head.predicted_variance) > ALONE]
    if alone:
        free = {id(head) for head in free_heads(heads)}
        high += [(head, number) for head, number in alone if id(head) in free]
    threshold = (
        "median over a layer's heads of logit_variance and of scale²·E‖q‖²·E‖k − k̄‖²/d, "
        f"both > {HIGH:g} with a median gain ratio < {GAIN:g} or (heads of {WIDE} and more) the one < {NORMS:g} × the "
        f"other; where the scale is > {LARGE:g}/√d, both > {HIGH / 2:g} with a gain ratio < {SUSPECTED:g} or the one < "
        f"{NORMS:g} × the other; in every layer both > {EVERYWHERE:g} with a gain ratio < {KEPT:g}; or both < 1/32; of "
        f"one head > {ALONE:g} (theory: 1)"
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
            "note",
            asked,
            "The logits' variance is {range} where 1/√d aims at 1, and the scale of the call is "
            f"{asked[0][0].scale if asked else 0.0:.2g}/√d.",
            f"scale > {LARGE:g}/√d, with both variances > {ASKED:g} in every layer",
            "If the queries are multiplied by 1/√d before the call, all is well: sound models come to such variances. "
            "Else it was left out.",
        ),
        *finding(
            KIND,
            "warning",
            [(head, number) for head, number in low if head.scale < 1.0 / LARGE],
            told + "too small a scale.",
            threshold,
            "Check that scores are not divided twice (1/d for 1/√d); try what_if=['scale=sqrt', 'temperature=0.5'].",
        ),
        *finding(
            KIND,
            "note",
            [(head, number) for head, number in low if not head.scale < 1.0 / LARGE],
            told + "too small queries and keys, or a scale applied to them as well.",
            threshold + "; the scale of the call is not small",
            "If the model is freshly initialised with small weights, this is how it starts. Else check that queries "
            "are not multiplied by 1/√d before a call that does it too; try what_if=['temperature=0.5'].",
        ),
    ]


def is_high(members) -> bool:
    """Has a layer what no sound model has in every one?"""
    return min(variances(members)) > EVERYWHERE and gain_of(members) < KEPT


def gain_of(members) -> float:
    return median(head.statistics.mean("gain_ratio") for head in members)


def suffers(members) -> bool:
    """Is the gradient gain of a layer gone, or its variance that of directions which know nothing of each other?"""
    if gain_of(members) < (SUSPECTED if members[0].scale > LARGE else GAIN):
        return True
    return telling(members[0]) and by_norms(members)


def telling(head) -> bool:
    """Does it mean anything that norms explain the variance? In narrow heads they always do."""
    return head.head_dim >= WIDE or head.scale > LARGE
