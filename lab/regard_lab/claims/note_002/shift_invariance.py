"""softmax(z + c) = softmax(z); in floating point as far as z + c keeps the digits of z."""

import torch

import regard
from regard_lab.claim import Figure, above, below, claim, conclude, gap

SHIFTS = [1.0, 1e2, 1e4, 1e6, 1e8]


@claim(
    statement="softmax(z + c) = softmax(z).",
    derivation=[
        r"\frac{e^{z_i + c}}{\sum_j e^{z_j + c}} = \frac{e^c e^{z_i}}{e^c \sum_j e^{z_j}} = \frac{e^{z_i}}{\sum_j "
        r"e^{z_j}}",
        r"\text{in floating point } z + c \text{ is off by up to } |c|\,\varepsilon/2, \quad \varepsilon = 1.2 "
        r"\times 10^{-7} \text{ in float32}",
    ],
    rule="Core: shifts by 100 change weights by rounding only, in float64 and float32. Beyond: a shift by 1e8 in "
    "float32.",
)
def measure(sampler):
    z = sampler.normal(200, 16, dtype=torch.float64)
    double, single = ([gap(regard.softmax(x + c), regard.softmax(x)) for c in SHIFTS] for x in (z, z.float()))
    drawn = {"float64": double, "float32": single}
    series = {name: (SHIFTS, [max(x, 1e-17) for x in changes]) for name, changes in drawn.items()}
    return conclude(
        below("largest change of a weight, float64, c = 100", 1e-13, double[1]),
        below("largest change of a weight, float32, c = 100", 1e-5, single[1]),
        below("largest change of a weight, float32, c = 1e8", 1e-5, single[-1]).beyond(),
        above("the same: z is round_numbers away", 0.1, single[-1]).ours(),
        condition="up to rounding: z + c must keep the digits of z. In float32 a shift by 1e8 rounds z away and "
        f"changes a weight by {single[-1]:.2f}",
        alt=f"The largest change of a weight grows with c, as z + c loses digits of z: at c = {SHIFTS[-1]:g} it is "
        f"{single[-1]:.2g} in float32 and {double[-1]:.2g} in float64.",
        figure=Figure("lines", "shift c", "largest change of a weight (0: at the foot)", series, log="xy"),
    )
