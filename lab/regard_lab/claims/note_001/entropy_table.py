"""The table of entropies: not reached with 10 keys, nor with more."""

import math

import regard
from regard_lab.claim import Figure, above, claim, conclude, difference, listed, mean, near

DIMS, KEYS = [16, 64, 256], 10
UNSCALED, SCALED = [2.1, 0.8, 0.2], [2.3, 2.3, 2.3]
LARGEST = math.log(KEYS)  # of an entropy


def entropies(sampler, d, keys=KEYS, rows=1200):
    """Return the mean entropy of independent rows, unscaled and scaled."""
    dots = sampler.dots(d, rows, 1, keys)
    return [mean(regard.statistics.of_scores(scale * dots).entropy) for scale in (1.0, d**-0.5)]


@claim(
    statement="Entropy at d_k = 16, 64, 256: unscaled 2.1, 0.8, 0.2; scaled 2.3 throughout.",
    derivation=[
        r"H \le \ln 10 = 2.303, \text{ with equality for equal scores only}",
        r"\text{scores of variance } \sigma^2 = 1: \quad H \approx \ln n - \tfrac{n-1}{2n}\sigma^2 < 2.3",
    ],
    rule="Wrong if a measured entropy differs from the table by more than 0.1 nats.",
)
def measure(sampler):
    unscaled, scaled = zip(*(entropies(sampler, d) for d in DIMS), strict=True)
    more = {n: entropies(sampler, 16, n, 200) for n in (15, 64, 256)}
    made = {"unscaled": listed("{:.2f}", unscaled), "scaled": listed("{:.2f}", scaled)}
    series = {
        "unscaled, claimed": (DIMS, UNSCALED),
        "unscaled, measured": (DIMS, unscaled),
        "scaled, claimed": (DIMS, SCALED),
        "scaled, measured": (DIMS, scaled),
    }
    return conclude(
        *(near(f"unscaled entropy, d_k = {d}", c, e, 0.1) for d, c, e in zip(DIMS, UNSCALED, unscaled, strict=True)),
        *(near(f"scaled entropy, d_k = {d}", c, e, 0.1) for d, c, e in zip(DIMS, SCALED, scaled, strict=True)),
        near("ln 10, the entropy of a uniform row", 2.3, LARGEST, 0.05).ours(),
        *(
            above(f"scaled minus unscaled at d_k = 16 with {n} keys (claimed: 0.2)", 0.5, difference(s, u)).ours()
            for n, (u, s) in more.items()
        ),
        right=f"With the note's 10 keys: unscaled {made['unscaled']}; scaled {made['scaled']}. 2.3 = ln 10 is the "
        "entropy of a uniform row, which scaling does not reach. That unscaled falls and scaled stays is true.",
        alt=f"Mean entropies at d_k {listed('{}', DIMS)}; unscaled measured {made['unscaled']}, claimed "
        f"{listed('{}', UNSCALED)}; scaled measured {made['scaled']}, claimed {listed('{}', SCALED)}; the most there "
        f"can be is {LARGEST:.2f}.",
        figure=Figure("lines", "d_k", "mean entropy of 10 keys, nats", series, log="x", guides={"ln 10": LARGEST}),
    )
