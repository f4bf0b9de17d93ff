"""Scaling two scores by k raises the ratio of their weights to the k-th power."""

import regard
from regard_lab.claim import Figure, claim, conclude, gap, listed, near

SCALES = [0.25, 0.5, 1.0, 2.0, 4.0]


@claim(
    statement="Scaling two scores by k turns their weight ratio a = e^(x1−x2) into a^k.",
    derivation=r"\frac{w_1}{w_2} = \frac{e^{k x_1}/Z}{e^{k x_2}/Z} = e^{k(x_1 - x_2)} = a^k",
    rule="Holds if the log ratio equals k·log a to rounding for every pair and every k.",
)
def measure(sampler):
    x = sampler.normal(1000, 2).double()
    log_a = x[:, 0] - x[:, 1]
    worst, example = 0.0, []
    for k in SCALES:
        w = regard.softmax(k * x)
        log_ratio = (w[:, 0] / w[:, 1]).log()
        worst = max(worst, gap(log_ratio, k * log_a))
        example.append(float(log_ratio[0] / log_a[0]))
    series = {"measured": (SCALES, example), "a^k": (SCALES, SCALES)}
    return conclude(
        near("largest |log(w₁/w₂) − k·log a| over 5000 pairs", 0.0, worst, 1e-10),
        alt="The log ratio of two weights, divided by log a, is k itself: "
        f"{listed('{:.3f} at {:g}', example, SCALES)}.",
        figure=Figure("lines", "k", "log(w₁/w₂) / log a", series),
    )
