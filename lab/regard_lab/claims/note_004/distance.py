"""The mean distance |i − j| under the weights."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, near

N = 32


def average_attention_distance(weights):
    """Return the mean distance by the note's function."""
    positions = torch.arange(weights.size(-1)).to(weights)
    return (weights * (positions[:, None] - positions[None, :]).abs()).sum(-1)


@claim(
    statement="The average attention distance from the weights.",
    derivation=[
        r"D_i = \sum_j w_{ij} |i - j|, \quad \text{uniform and causal: } \frac{1}{i+1}\sum_{j=0}^{i} (i - j) = i/2"
    ],
    rule="Holds if the note's function agrees with the library's, from weights and from the fused pass, and with i/2.",
)
def measure(sampler):
    w = regard.softmax(sampler.normal(N, N).double(), mask=regard.masks.causal(N))
    theirs, ours = average_attention_distance(w), regard.statistics.of_weights(w).distance
    q = sampler.normal(1, 1, N, 16).double()
    _, weights = regard.reference.attention(q, q, q, is_causal=True)
    _, stats = regard.attention(q, q, q, is_causal=True, return_stats=("distance",))
    uniform = regard.softmax(torch.zeros(N, N).double(), mask=regard.masks.causal(N))
    series = {"random scores": (range(N), theirs), "uniform: i/2": (range(N), [i / 2 for i in range(N)])}
    unbuilt = gap(average_attention_distance(weights[0, 0]), stats.distance[0, 0])
    return conclude(
        below("largest |note's − regard.statistics.of_weights|", 1e-12, gap(theirs, ours)),
        below("largest |note's − regard.attention's, no weights built|", 1e-9, unbuilt),
        near("uniform causal row 31: the mean of 0 … 31", 15.5, average_attention_distance(uniform)[-1], 1e-9),
        remark="It counts on as many queries as keys and on rows that sum to 1: for one query against a cache it "
        "broadcasts to N numbers without a word. regard's divides by Σw and counts positions as the causal mask does.",
        alt="The mean distance of causal rows scatters about i/2, its value for uniform weights.",
        figure=Figure("lines", "query i", "mean distance", series),
    )
