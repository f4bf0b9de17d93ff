"""The mean of q·k for independent entries."""

from regard_lab.claim import Figure, bands, claim, conclude, listed, mean, near

DIMS = [4, 16, 64, 256]


@claim(
    statement="E[q·k] = 0 for independent unit-variance entries (of mean 0, as the note assumes).",
    derivation=[
        r"\mathbb{E}[q \cdot k] = \sum_i \mathbb{E}[q_i]\,\mathbb{E}[k_i] = 0",
        r"\text{with means } \mu: \quad \mathbb{E}[q \cdot k] = d_k\,\mu_q \mu_k",
    ],
    rule="Holds if the mean is within 0.05 standard deviations of 0 at every d_k.",
)
def measure(sampler):
    means = [mean(sampler.dots(d, 200, 24, 24).mean((-1, -2)) / d**0.5) for d in DIMS]
    q, k = sampler.normal(200, 24, 64) + 0.5, sampler.normal(200, 64, 24) + 0.5
    shifted = mean((q @ k).mean((-1, -2)))
    series = {"mean and 99.99 % interval": (DIMS, *bands(means))}
    return conclude(
        *(near(f"E[q·k]/√d_k, d_k = {d}", 0.0, m, 0.05) for d, m in zip(DIMS, means, strict=True)),
        near("E[q·k] at d_k = 64 when entries have mean ½ (d_k·μ²)", 16.0, shifted, 1.0).ours(),
        remark="The note assumes mean 0, and needs it: entries of mean μ give E[q·k] = d_k·μ². Within a row softmax "
        "ignores that constant; what stays is μ·Σ(k − μ), the same for every query: all of them prefer the same keys.",
        alt=f"The mean of q·k in standard deviations: {listed('{:.3f} at d_k {}', means, DIMS)}.",
        figure=Figure("bands", "d_k", "E[q·k] / √d_k", series, log="x", guides={"predicted": 0.0}),
    )
