"""Masked positions get weight 0."""

import torch

import regard
from regard.lab.claim import Claim, Finding, below, near
from regard.lab.estimate import exact
from regard.lab.figure import Figure


def measure(bench):
    n, lengths = 12, [12, 7, 1]
    s = 3 * bench.normal(3, n, n)
    causal = regard.masks.causal(n)
    padding = regard.masks.padding(lengths, n)[:, None, :]
    w = regard.softmax(s, mask=causal & padding)
    hidden = ~(causal & padding)
    q = bench.normal(3, 1, n, 8)
    _, stats = regard.attention(
        q, q, q, is_causal=True, key_lengths=torch.tensor(lengths), return_stats=("visible_keys",)
    )
    counted = (causal & padding).sum(-1)
    return Finding(
        [
            near("largest weight at a masked position", 0.0, exact(w[hidden].max()), 1e-300),
            below("largest |Σ w − 1| over what is visible", 1e-6, exact((w.sum(-1) - 1).abs().max())),
            near(
                "keys counted by regard.attention, minus the mask's",
                0.0,
                exact((stats.visible_keys[:, 0] - counted).abs().max()),
                1e-6,
            ).ours(),
        ],
        remark="A row of which nothing is visible is NaN with −inf in plain softmax; regard gives it zeros.",
        figure=lambda: Figure(
            "heat",
            "key",
            "query",
            rows=w[1].tolist(),
            alt="Weights of a causal row block whose last five keys are padding: zero above the diagonal and from "
            "key 7 on.",
        ),
    )


claim = Claim(
    id="causal-and-padding",
    note="004",
    statement="Masked positions get weight 0.",
    derivation=[r"s_j = -\infty \Rightarrow e^{s_j - m} = 0 \text{ exactly, as long as } m > -\infty"],
    rule="Holds if every masked weight is exactly 0 and the visible ones sum to 1.",
    measure=measure,
)
