"""Table 3 (B) of the Transformer paper: with scaling BLEU falls with d_k, and there is no unscaled row."""

from regard_lab.claim import Estimate, Figure, above, claim, conclude, near

PUBLISHED = {64: 25.8, 32: 25.4, 16: 25.1}  # newstest2013, arXiv 1706.03762, Table 3: base and (B); all of them scaled


def change(start, end):
    """Return the difference of two numbers printed to one digit (± 0.1 of rounding; the paper gives no spread)."""
    difference = PUBLISHED[end] - PUBLISHED[start]
    return Estimate(difference, difference - 0.1, difference + 0.1)


@claim(
    statement="In the Transformer paper's Table 3 (B), without scaling BLEU rises when d_k falls from 64 to 32, with "
    "scaling it is stable.",
    derivation=r"25.4 - 25.8 = -0.4 \pm 0.1, \quad 25.1 - 25.8 = -0.7 \pm 0.1",
    rule="Judged from the published row, all of it scaled, with the rounding of its digits as interval: wrong if BLEU "
    "falls where it should rise, or moves where it should be stable.",
)
def measure(sampler):
    series = {"published, scaled": (list(PUBLISHED), list(PUBLISHED.values()))}
    return conclude(
        above("published BLEU (scaled), d_k from 64 to 32, ± rounding", 0.0, change(64, 32)),
        near("published BLEU (scaled), d_k from 64 to 16 (“stable”), ± rounding", 0.0, change(64, 16), 0.2),
        remark="These intervals are the rounding of the printed numbers, ± 0.1 on a difference, and not a sampling "
        "error: the paper gives one BLEU for each d_k, and only with scaling.",
        right="The row varies d_k with scaling only, and BLEU falls as d_k falls: "
        f"{', '.join(map(str, PUBLISHED.values()))}. Without scaling the paper reports no BLEU by d_k; that needs a "
        "training run.",
        alt=f"Published BLEU, with scaling: {', '.join(f'{bleu} at d_k {d}' for d, bleu in PUBLISHED.items())}.",
        figure=Figure("lines", "d_k", "BLEU, newstest2013", series, log="x"),
    )
