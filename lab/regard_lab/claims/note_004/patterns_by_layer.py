"""Trained: what the layers and heads of small softmax models do, at two head sizes."""

import statistics

from regard_lab import training
from regard_lab.claim import Figure, above, claim, conclude
from regard_lab.training.results import estimate, sign_of

DIMS = (16, 64)  # with several heads in a layer
SAID = {1: "the first looks farther", -1: "the second looks farther", 0: "which the seeds do not settle"}
SINK = 0.3  # of a row's mass, on average, on its first key


def models(d):
    """Return the [layer][head] readings of the models with 1/√d_k, one per seed: 2 layers of 256/d_k heads."""
    records = training.shipped("scale")["records"]
    return [r["final"]["heads"] for r in records if r["variant"] == f"sqrt-d{d}" and not r["diverged"]]


def mean(layer, name):
    return statistics.fmean(head[name] for head in layer)


@claim(
    statement="What do layers and heads of a trained model do: sharp, diffuse, local, sink? Put as a claim: the first "
    "layer looks wide and flat, the next sharper and nearer, and sinks form.",
    derivation=r"H/\ln n, \quad \textstyle\sum_j \bar p_j |i - j|, \quad \bar p_{\text{first}}",
    rule="Core: entropy / ln n must be larger in the first layer than in the second at d_k = 16 and 64, and distance "
    f"at d_k = 16 (95 % intervals over seeds). Beyond: some head must give its first key more than {SINK} of its mass.",
)
def measure(sampler):
    found = {d: models(d) for d in DIMS}
    flatter = {d: [mean(m[0], "entropy_ratio") - mean(m[1], "entropy_ratio") for m in found[d]] for d in DIMS}
    farther = {d: [mean(m[0], "distance") - mean(m[1], "distance") for m in found[d]] for d in DIMS}
    first = [max(head["first_key_mass"] for layer in m for head in layer) for d in DIMS for m in found[d]]
    heads = [(layer, head) for d in DIMS for m in found[d] for layer, its in enumerate(m) for head in its]
    sharpest = min(heads, key=lambda pair: pair[1]["entropy_ratio"])
    ratios = {i: [[head["entropy_ratio"] for head in m[i]] for m in found[64]] for i in (0, 1)}
    spread = {i: statistics.fmean(max(own) - min(own) for own in ratios[i]) for i in (0, 1)}
    places = [(f"d_k {d}, layer {i + 1}", [m[i] for m in found[d]]) for d in DIMS for i in (0, 1)]
    drawn = [(name, head["entropy_ratio"]) for name, layers in places for layer in layers for head in layer]
    means = [f"{n}, mean {statistics.fmean(mean(x, 'entropy_ratio') for x in layers):.2f}" for n, layers in places]
    return conclude(
        *(above(f"entropy / ln n, first layer − second, d_k = {d}", 0.0, estimate(flatter[d])) for d in DIMS),
        above("distance, first layer − second, characters, d_k = 16", 0.0, estimate(farther[16])),
        above("first key's mass in the head that gives it most", SINK, estimate(first)).beyond(),
        condition="sinks are left out: in models of this size and training none has formed",
        right="The first layer is not the flatter one.",
        remark=f"At d_k = 64 the sharpest and the flattest head of the first layer lie {spread[0]:.2f} of ln n apart, "
        f"those of the second {spread[1]:.2f}. The sharpest of all has {sharpest[1]['entropy_ratio']:.2f} at a mean "
        f"distance of {sharpest[1]['distance']:.1f} characters, in the {('first', 'second')[sharpest[0]]} layer. "
        f"Distance at d_k = 64, first layer − second: {estimate(farther[64])} characters, "
        f"{SAID[sign_of(estimate(farther[64]))]}.",
        alt=f"Entropy over ln n of every head by layer: {'; '.join(means)}.",
        figure=Figure("dots", "", "entropy / ln n of a head", {"a head": list(zip(*drawn, strict=True))}),
    )
