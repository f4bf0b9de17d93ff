"""Softmax lies in the open (0, 1): in exact arithmetic, and for two scores or more."""

import torch

import regard
from regard_lab.claim import Figure, above, below, claim, conclude

GAPS = [1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0, 104.0, 200.0, 400.0, 690.0, 746.0, 800.0]


def pair(gap, dtype):
    return regard.softmax(torch.tensor([gap, 0.0], dtype=dtype))


def edges(softmax, dtype):
    """Return the first whole gaps at which the larger weight is exactly 1, and the smaller exactly 0."""
    gaps = torch.arange(1.0, 801.0, dtype=dtype)
    larger, smaller = softmax(torch.stack([gaps, torch.zeros_like(gaps)], -1)).unbind(-1)
    return int(gaps[larger == 1].min()), int(gaps[smaller == 0].min())


def torch_softmax(scores):
    return torch.softmax(scores, -1)


@claim(
    statement="softmax maps into the open (0, 1).",
    derivation=[
        r"0 < e^{z_i} < \sum_j e^{z_j} \text{ for } K \ge 2",
        r"\text{in float32: } e^{-200} \to 0, \quad 1/(1 + e^{-32}) \to 1",
    ],
    rule="Core: weights of ordinary scores lie strictly inside. Beyond: large gaps in float32, and a single score.",
)
def measure(sampler):
    w = regard.softmax(sampler.normal(1000, 16).double())
    drawn = {
        name: [max(float(torch_softmax(torch.tensor([gap, 0.0], dtype=dtype))[1]), 1e-300) for gap in GAPS]
        for name, dtype in (("float64", torch.float64), ("float32", torch.float32))
    }
    single, double = (edges(torch_softmax, dtype) for dtype in (torch.float32, torch.float64))
    own = [edges(regard.softmax, dtype)[1] for dtype in (torch.float32, torch.float64)]
    series = {name: (GAPS, smaller) for name, smaller in drawn.items()}
    return conclude(
        above("smallest weight, normal scores", 0.0, w.min()),
        below("largest weight, normal scores", 1.0, w.max()),
        below("largest of two weights 32 apart, float32", 1.0, pair(32.0, torch.float32)[0]).beyond(),
        above("smallest of two weights 200 apart, float32", 0.0, pair(200.0, torch.float32)[1]).beyond(),
        below("the weight of a single score (K = 1)", 1.0, regard.softmax(torch.zeros(1)).max()).beyond(),
        condition="K ≥ 2 and the scores lie close enough. By torch.softmax the larger of two weights rounds to 1 at "
        f"a gap of {single[0]} in float32 and {double[0]} in float64, the smaller to 0 at {single[1]} and {double[1]}",
        remark=f"regard.softmax gives 0 from gaps of {own[0]} and {own[1]} on: its exp on the CPU leaves out the "
        "numbers too small for all their digits (subnormal).",
        alt="The smaller of two weights, by torch.softmax, falls as e to the minus gap; it is exactly 0 from a "
        f"gap of {single[1]} on in float32 and of {double[1]} in float64.",
        figure=Figure(
            "lines", "gap between two scores", "smaller weight, torch.softmax (foot: ≤ 1e-300)", series, log="y"
        ),
    )
