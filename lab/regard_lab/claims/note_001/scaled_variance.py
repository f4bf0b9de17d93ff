"""Dividing by √d_k makes the variance 1 at every d_k."""

from regard_lab.claim import Figure, bands, claim, conclude, listed, mean, near

DIMS = [1, 4, 16, 64, 256]
BLOCKS = {1: 12000, 4: 5000, 16: 2000, 64: 1000, 256: 500}


@claim(
    note="001, 003",
    statement="Var(q·k/√d_k) = 1 for every d_k.",
    derivation=[r"\mathrm{Var}(X/c) = \mathrm{Var}(X)/c^2", r"\mathrm{Var}(q \cdot k/\sqrt{d_k}) = d_k/d_k = 1"],
    rule="Holds if the variance is 1 to 6 % at every d_k from 1 to 256.",
)
def measure(sampler):
    variances = [mean((sampler.dots(d, BLOCKS[d], 12, 12) / d**0.5).square().mean((-1, -2))) for d in DIMS]
    series = {"measured": (DIMS, *bands(variances))}
    checks = [near(f"Var(q·k/√d_k) at d_k = {d}", 1.0, v, 0.06) for d, v in zip(DIMS, variances, strict=True)]
    return conclude(
        *reversed(checks),
        alt=f"The variance of the scaled score: {listed('{:.3f} at d_k {}', variances, DIMS)}.",
        figure=Figure("bands", "d_k", "Var(q·k/√d_k)", series, log="x", guides={"predicted": 1.0}),
    )
