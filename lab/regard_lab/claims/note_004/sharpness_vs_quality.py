"""Trained: sharpness, 1 − entropy / ln n, against loss, over the checkpoints of a run and over runs."""

import statistics

import numpy as np
from scipy.stats import rankdata

from regard_lab import training
from regard_lab.claim import Figure, above, below, claim, conclude
from regard_lab.training.results import estimate, paired_differences

SOURCES = ("scale", "normalizers")  # one model, one text, one budget; softmax is sqrt-d64 there again
GROUPS = {
    "scale none": ("none-d16", "none-d64", "none-d256"),
    "scale 1/√d": ("sqrt-d16", "sqrt-d64", "sqrt-d256"),
    "scale 1/d": ("inverse-d16", "inverse-d64", "inverse-d256"),
    "softmax1": ("softmax1",),
    "entmax, sparsemax": ("entmax", "entmax15", "sparsemax"),
    "relu, sigmoid, softpick": ("relu", "sigmoid", "softpick"),
}
AS_SHARP = 0.02  # apart, of a sharpness between 0 and 1


def point(entry):
    return 1.0 - entry["entropy_ratio"], entry["loss"]


def rank_correlation(x, y):
    """Return Spearman's ρ along the last axis."""
    x, y = (rankdata(side, axis=-1) for side in (x, y))
    x, y = (side - side.mean(-1, keepdims=True) for side in (x, y))
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


@claim(
    statement="How does attention sharpness relate to model quality? Put as a claim: the sharper a model attends, the "
    "lower its loss.",
    derivation=r"\text{sharpness} = 1 - H/\ln n, \quad \rho = \text{rank correlation with the loss}",
    rule="Core: within a run, over its checkpoints, sharper must go with a lower loss (mean rank correlation < 0), and "
    "a model flattened by the scale 1/d must be worse than 1/√d. Beyond: one sharpened by no scale must be better. 95 "
    "% intervals over runs and seeds.",
)
def measure(sampler):
    records = [r for name in SOURCES for r in training.shipped(name)["records"]]
    records = [r for r in records if not r["diverged"] and r["variant"] != "softmax"]
    within = estimate([float(rank_correlation(*zip(*map(point, r["history"]), strict=True))) for r in records])
    runs: dict[str, list] = {}
    for r in records:
        runs.setdefault(r["variant"], []).append(point(r["final"]))
    means = {name: tuple(map(statistics.fmean, zip(*ends, strict=True))) for name, ends in runs.items()}
    scale = training.shipped("scale")
    flatter, sharper = (estimate(paired_differences(scale, f"{name}-d64", "sqrt-d64")) for name in ("inverse", "none"))
    across = rank_correlation(*zip(*means.values(), strict=True))
    best = min(means, key=lambda name: means[name][1])
    worst = max(means, key=lambda name: means[name][1])
    near = [(a, b) for a in means for b in means if a < b and abs(means[a][0] - means[b][0]) < AS_SHARP]
    twins = sorted(max(near, key=lambda pair: abs(means[pair[0]][1] - means[pair[1]][1])))
    named = [f"{name} (sharpness {means[name][0]:.2f}, loss {means[name][1]:.3f})" for name in (best, worst, *twins)]
    series = {
        group: list(zip(*[end for name in names for end in runs.get(name, [])], strict=True))
        for group, names in GROUPS.items()
    }
    return conclude(
        below("rank correlation of sharpness and loss over a run's checkpoints", 0.0, within),
        above("loss of the flatter 1/d − 1/√d, d_k = 64, nats", 0.0, flatter),
        below("loss of the sharper unscaled − 1/√d, d_k = 64, nats", 0.0, sharper).beyond(),
        condition="attention is flatter than 1/√d makes it, or one run is followed, which grows sharper as it learns; "
        "sharper still, the loss rises again",
        right="Sharpness does not go with a lower loss.",
        remark=f"Between trained models, rank correlation of sharpness with the loss: {across:+.2f} over {len(means)} "
        f"variants. Best {named[0]}, worst {named[1]}; as sharp as one another and furthest apart in loss: {named[2]} "
        f"and {named[3]}. {len(records)} runs, {sum(len(r['history']) for r in records)} checkpoints; "
        f"{records[0]['where']}.",
        alt=f"Sharpness against loss of {len(records)} trained models: best {named[0]}, worst {named[1]}.",
        figure=Figure("points", "sharpness, 1 − entropy / ln n", "validation loss", series),
    )
