"""Table 3 (B) of the Transformer paper: with scaling BLEU falls with d_k, and there is no unscaled row."""

from regard.lab.claim import Claim, Finding, above, near
from regard.lab.estimate import Estimate
from regard.lab.figure import Figure

PUBLISHED = {64: 25.8, 32: 25.4, 16: 25.1}  # newstest2013, arXiv 1706.03762, Table 3: base and (B); all of them scaled


def change(start, end):
    """A difference of two numbers printed to one digit: ± 0.1."""
    difference = PUBLISHED[end] - PUBLISHED[start]
    return Estimate(difference, difference - 0.1, difference + 0.1)


def measure(bench):
    return Finding(
        [
            above("BLEU, d_k from 64 to 32", 0.0, change(64, 32)),
            near("BLEU, d_k from 64 to 16, with scaling “stable”", 0.0, change(64, 16), 0.2),
        ],
        right="The row varies d_k with scaling only, and BLEU falls as d_k falls: 25.8, 25.4, 25.1. Without scaling "
        "the paper reports no BLEU by d_k; that needs a training run.",
        figure=lambda: Figure(
            "lines",
            "d_k",
            "BLEU, newstest2013",
            {"published, scaled": (list(PUBLISHED), list(PUBLISHED.values()))},
            log_x=True,
            alt="Published BLEU: 25.1 at d_k 16, 25.4 at 32, 25.8 at 64.",
        ),
    )


claim = Claim(
    id="table3-row-b",
    note="001",
    statement="In the Transformer paper's Table 3 (B), without scaling BLEU rises when d_k falls from 64 to 32, with "
    "scaling it is stable.",
    derivation=[r"25.4 - 25.8 = -0.4 \pm 0.1, \quad 25.1 - 25.8 = -0.7 \pm 0.1"],
    rule="Judged from the published row: wrong if BLEU falls where it should rise, or moves where it should be stable.",
    measure=measure,
)
