"""The softmax of QKᵀ/√d runs over the keys, not over d."""

import torch

import regard
from regard_lab.claim import Figure, claim, conclude, near

D, SHAPES = 16, [4, 16, 64, 256]


@claim(
    statement="The softmax of QKᵀ/√d normalises over d entries.",
    derivation=[
        r"Q \in \mathbb{R}^{m \times d},\; K \in \mathbb{R}^{n \times d} \Rightarrow Q K^{\top} \in \mathbb{R}^{m "
        r"\times n}",
        r"w_{ij} = e^{s_{ij}} / \sum_{j=1}^{n} e^{s_{ij}}",
    ],
    rule="Wrong if a row has another number of weights than d.",
)
def measure(sampler):
    counted, entropies = [], []
    for keys in SHAPES:
        q, k = sampler.normal(1, 1, 8, D), sampler.normal(1, 1, keys, D)
        _, stats = regard.attention(q, k, k, return_stats=("support", "entropy"), temperature=1e6)
        counted.append(float(stats.support.mean()))
        entropies.append(float(stats.entropy.mean()))
    entries = torch.tensor(counted)
    series = {"measured": (SHAPES, counted), "claimed: d = 16": (SHAPES, [D] * len(SHAPES))}
    return conclude(
        near("weights in a row at d = 16, 64 keys", float(D), entries[2], 0.5),
        near("weights in a row at d = 16, 256 keys", float(D), entries[3], 0.5),
        near("entropy of the flat row over 64 keys, nats (ln 64)", 4.1589, entropies[2], 1e-3).ours(),
        right="A row of softmax(QKᵀ/√d) has one weight per key, n of them; d is the length of q and k, summed away "
        "in q·k.",
        alt="The number of weights in a row equals the number of keys, whatever d is.",
        figure=Figure("lines", "number of keys n", "weights in a row", series, log="xy"),
    )
