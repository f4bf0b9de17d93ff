"""s(1 − s) of the scaled example: one of the five is below 0.01."""

import torch

import regard
from regard_lab.claim import Figure, above, claim, conclude, listed

SCORES = [-3.0, -1.0, 0.0, 1.0, 3.0]


@claim(
    statement="After scaling, s(1 − s) > 0.01 for each of the entries of softmax(−3, −1, 0, 1, 3).",
    derivation=r"s_1 = e^{-3}/24.22 = 0.0021 \Rightarrow s_1(1 - s_1) = 0.0021 < 0.01",
    rule="Wrong if one of the five slopes is not above 0.01.",
)
def measure(sampler):
    slopes = regard.jacobian(torch.tensor(SCORES, dtype=torch.float64)).diagonal()
    alive = int((slopes > 0.01).sum())
    unscaled = regard.jacobian(8 * torch.tensor(SCORES, dtype=torch.float64)).diagonal().max()
    series = {"measured": ([f"{z:g}" for z in SCORES], slopes)}
    return conclude(
        above("smallest s(1 − s), score −3", 0.01, slopes.min()),
        *(above(f"s(1 − s) of score {z:g}", 0.01, s) for z, s in zip(SCORES[1:], slopes[1:], strict=True)),
        above("largest s(1 − s), scaled over unscaled", 1e3, slopes.max() / unscaled).ours(),
        right=f"{alive} of the 5 exceed 0.01; the smallest is {slopes.min():.4f}. What scaling does is true: "
        f"unscaled, the largest of the five is {unscaled:.1e}.",
        alt=f"The slope s(1 − s) for the five scores: {listed('{:.4f}', slopes)}; the first is below 0.01.",
        figure=Figure("bars", "score", "s(1 − s)", series, guides={"claimed minimum 0.01": 0.01}),
    )
