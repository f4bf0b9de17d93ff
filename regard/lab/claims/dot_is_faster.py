"""One matrix product against N² tanh's of length d: timed on this machine."""

import time

import torch

from regard.lab.claim import Claim, Finding, above
from regard.lab.estimate import Estimate
from regard.lab.figure import Figure

QUERIES, DIMS = 128, [32, 64, 128]


def dot(q, k, v):
    return q @ k.T / q.shape[-1] ** 0.5


def additive(q, k, v):
    return torch.tanh(q[:, None, :] + k) @ v


def seconds(score, arguments, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        score(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def measure(bench):
    ratios = []
    for d in DIMS:
        arguments = bench.normal(QUERIES, d), bench.normal(QUERIES, d), bench.normal(d)
        rounds = [seconds(additive, arguments, 2) / seconds(dot, arguments, 10) for _ in range(4)]
        ratios.append(Estimate(sorted(rounds)[2], min(rounds), max(rounds)))
    return Finding(
        [above(f"time, additive over scaled dot product, d = {d}", 1.0, r) for d, r in zip(DIMS, ratios, strict=True)],
        remark="The interval is the range of four timings on this machine. Additive attention also holds N²·d numbers.",
        figure=lambda: Figure(
            "bars",
            "d",
            "time, additive / dot",
            {"measured": ([str(d) for d in DIMS], [r.value for r in ratios])},
            alt="Additive scores take many times as long as dot products: " + ", ".join(f"{r.value:.0f}" for r in ratios),
        ),
    )


claim = Claim(
    id="dot-is-faster",
    note="001",
    statement="Scaled dot product is cheaper than additive attention.",
    derivation=[
        r"\text{dot: } N^2 d \text{ multiply-adds, one matrix product}",
        r"\text{additive: } N^2 d \text{ additions, } N^2 d \tanh, N^2 d \text{ multiply-adds, and } N^2 d \text{ numbers in memory}",
    ],
    rule="Holds if every timing of the additive scores is longer than every timing of the dot products.",
    measure=measure,
)
