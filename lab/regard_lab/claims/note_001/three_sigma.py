"""[−24, 24] is three standard deviations at d_k = 64: nearly all scores, but not their span."""

from regard_lab.claim import Figure, above, below, claim, conclude, listed, mean, near, quantile

COUNTS = [16, 64, 256, 1024]


@claim(
    statement="At d_k = 64 the dot products span about [−24, 24].",
    derivation=[
        r"\sigma = \sqrt{64} = 8, \quad P(|q \cdot k| \le 3\sigma) \approx 0.997",
        r"\mathbb{E}\max_{j \le n} |q \cdot k_j| \approx \sigma\sqrt{2 \ln n}",
    ],
    rule="Core: more than 99 % lie within. Beyond: the largest of 1024 scores must lie within too, to be a span.",
)
def measure(sampler):
    scores = sampler.dots(64, 600)  # 600 blocks of 1024 scores
    inside = mean((scores.abs() <= 24).double().mean((-1, -2)))
    largest = [quantile(scores.flatten(1)[:, :n].abs().amax(-1), 0.5) for n in COUNTS]
    series = {"measured": (COUNTS, largest)}
    return conclude(
        above("share of scores within ±24", 0.99, inside),
        near("share of scores within ±24, a normal law", 0.9973, inside, 0.003).ours(),
        below("median of the largest |q·k| among 1024", 24.0, largest[-1]).beyond(),
        condition=f"“span” means the bulk, {100 * inside.value:.1f} % of the scores; the largest grows with their "
        "number, about as 8·√(2 ln n)",
        alt=f"The median of the largest of n scores: {listed('{:.1f} of {}', largest, COUNTS)}.",
        figure=Figure("lines", "number of scores", "median largest |q·k|", series, log="x", guides={"24": 24.0}),
    )
