"""The note's own script, run many times: its printed output is not what it prints."""

import regard
from regard_lab.claim import Figure, claim, conclude, listed, mean, near, quantile

DIMS, RUNS = [16, 64, 256], 400
UNSCALED, SCALED = [0.342, 0.891, 0.998], [0.289, 0.276, 0.301]


def script(sampler, d):
    """Return attn.max() of 10 queries and 10 keys, unscaled and scaled, one number per run."""
    dots = sampler.dots(d, RUNS, 10, 10)
    return [regard.softmax(scale * dots).flatten(1).amax(-1) for scale in (1.0, d**-0.5)]


@claim(
    statement="The note's script (10 queries, 10 keys) gives the largest weight 0.342, 0.891, 0.998 unscaled and "
    "0.289, 0.276, 0.301 scaled.",
    derivation=r"\max_{ij} w_{ij} \text{ over 10 rows is the sharpest row's: one unscaled row in ten is one-hot "
    r"already at } d_k = 16",
    rule="Wrong if the median output over many runs differs from a printed number by more than 0.05.",
)
def measure(sampler):
    unscaled, scaled = zip(*(script(sampler, d) for d in DIMS), strict=True)
    medians = [quantile(x, 0.5) for x in (*unscaled, *scaled)]
    rows = regard.softmax(sampler.dots(64, RUNS, 10, 10) / 8).amax(-1).mean(-1)
    names = [f"{kind}, d_k = {d}" for kind in ("unscaled", "scaled") for d in DIMS]
    series = {
        name: (DIMS, *([x.quantile(p) for x in runs] for p in (0.01, 0.5, 0.99)))
        for name, runs in (("unscaled", unscaled), ("scaled", scaled))
    }
    claimed = {"unscaled, claimed": UNSCALED, "scaled, claimed": SCALED}
    series |= {name: (DIMS, numbers, numbers, numbers) for name, numbers in claimed.items()}
    pairs = "; ".join(f"{m:.3f} and {c:.3f} {n}" for n, m, c in zip(names, medians, UNSCALED + SCALED, strict=True))
    return conclude(
        *(near(f"median output, {n}", c, m, 0.05) for n, c, m in zip(names, UNSCALED + SCALED, medians, strict=True)),
        near("mean of the ten rows' largest weights, scaled, d_k = 64", 0.32, mean(rows), 0.02).ours(),
        right=f"The script takes the largest of 100 weights. Its median output is {listed('{:.3f}', medians[:3])} "
        f"unscaled and {listed('{:.3f}', medians[3:])} scaled; in {RUNS} runs at d_k = 16 unscaled the smallest was "
        f"{unscaled[0].min():.3f}.",
        alt=f"The script's median output and the claimed one: {pairs}.",
        figure=Figure("bands", "d_k", "script's output: median, 1 to 99 %", series, log="x"),
    )
