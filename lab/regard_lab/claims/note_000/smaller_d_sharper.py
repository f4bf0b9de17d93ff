"""Dividing by √d with a smaller d: sharper only if the scores themselves stay put."""

import regard
from regard_lab.claim import Figure, above, claim, conclude, difference, mean, near

DIMS = [1, 4, 16, 64, 256]
KEYS = 10


def largest(scores):
    """Return the largest weight, one independent row per sample."""
    return mean(regard.softmax(scores).amax(-1))


@claim(
    statement="The smaller d, the closer softmax(QKᵀ/√d) is to one-hot.",
    derivation=[
        r"\text{fixed scores: } a' = a^{1/\sqrt d} \text{ grows as } d \text{ falls}",
        r"\text{but } \mathrm{Var}(q \cdot k) = d \Rightarrow \mathrm{Var}(q \cdot k/\sqrt d) = 1 \text{ for every } d",
    ],
    rule="Core: with the scores held fixed a smaller d must be sharper. Beyond: it must be so for q and k that "
    "depend on d.",
)
def measure(sampler):
    fixed = 8.0 * sampler.normal(2000, KEYS)  # the same scores for every d
    held = [largest(fixed / d**0.5) for d in DIMS]
    drawn = [largest(sampler.dots(d, 4000, 1, KEYS) / d**0.5) for d in DIMS]
    series = {"scores held fixed": (DIMS, held), "unit-variance q, k": (DIMS, drawn)}
    moved, little = difference(drawn[1], drawn[4]), difference(drawn[2], drawn[4])
    return conclude(
        above("largest weight, d = 4 minus d = 256, the same scores", 0.2, difference(held[1], held[4])),
        above("largest weight, d = 4 minus d = 256, unit-variance q and k", 0.02, moved).beyond(),
        near("largest weight, d = 16 minus d = 256, unit-variance q and k", 0.0, little, 0.03).ours(),
        condition="QKᵀ is held fixed while d changes; with unit-variance entries QKᵀ grows as √d and cancels it",
        remark="With random q and k a small d is even a little flatter: |q|²/d, the variance of a row, then varies "
        "more.",
        alt="With fixed scores the largest weight falls as d grows; with unit-variance q and k it hardly moves.",
        figure=Figure("lines", "d", "mean largest weight of 10", series, log="x"),
    )
