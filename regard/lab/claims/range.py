"""Softmax lies in the open (0, 1): in exact arithmetic, and for two scores or more."""

import torch

import regard
from regard.lab.claim import Claim, Finding, above, below
from regard.lab.estimate import exact
from regard.lab.figure import Figure

GAPS = [1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0, 200.0, 400.0, 800.0]


def pair(gap, dtype):
    return regard.softmax(torch.tensor([gap, 0.0], dtype=dtype))


def edges(dtype):
    """The first whole gaps at which the larger weight is exactly 1, and the smaller exactly 0."""
    gaps = torch.arange(1.0, 801.0, dtype=dtype)
    larger, smaller = regard.softmax(torch.stack([gaps, torch.zeros_like(gaps)], -1)).unbind(-1)
    return f"{int(gaps[larger == 1].min())} and {int(gaps[smaller == 0].min())}"


def measure(bench):
    w = regard.softmax(bench.normal(1000, 16).double())
    float32 = [pair(gap, torch.float32) for gap in GAPS]
    float64 = [pair(gap, torch.float64) for gap in GAPS]
    return Finding(
        [
            above("smallest weight, normal scores", 0.0, exact(w.min())),
            below("largest weight, normal scores", 1.0, exact(w.max())),
            below("largest of two weights 32 apart, float32", 1.0, exact(pair(32.0, torch.float32)[0])).beyond(),
            above("smallest of two weights 200 apart, float32", 0.0, exact(pair(200.0, torch.float32)[1])).beyond(),
            below("the weight of a single score (K = 1)", 1.0, exact(regard.softmax(torch.zeros(1)).max())).beyond(),
        ],
        condition="K ≥ 2 and the scores lie close enough: the larger of two weights rounds to 1 and the smaller to 0 "
        f"at gaps of {edges(torch.float32)} in float32, {edges(torch.float64)} in float64",
        figure=lambda: Figure(
            "lines",
            "gap between two scores",
            "smaller weight (0: at the foot)",
            {
                "float64": (GAPS, [max(float(w[1]), 1e-300) for w in float64]),
                "float32": (GAPS, [max(float(w[1]), 1e-300) for w in float32]),
            },
            log_y=True,
            alt="The smaller of two weights falls as e to the minus gap; in float32 it becomes exactly 0 beyond "
            "about 104.",
        ),
    )


claim = Claim(
    id="range",
    note="002",
    statement="softmax maps into the open (0, 1).",
    derivation=[
        r"0 < e^{z_i} < \sum_j e^{z_j} \text{ for } K \ge 2",
        r"\text{in float32: } e^{-200} \to 0, \quad 1/(1 + e^{-32}) \to 1",
    ],
    rule="Core: weights of ordinary scores lie strictly inside. Beyond: large gaps in float32, and a single score.",
    measure=measure,
)
