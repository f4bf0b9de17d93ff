"""Masked positions get weight 0, unless the row sees nothing: −inf − (−inf) is no number."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, near

N, LENGTHS = 12, [12, 7, 1]


def note(scores, visible):
    """Return the weights by the note's own code."""
    return torch.softmax(scores.masked_fill(visible == 0, float("-inf")), -1)


def zeros(w, hidden):
    """Return the share of masked weights that are exactly 0 (NaN is not)."""
    return (w[hidden] == 0).double().mean()


@claim(
    statement="Masked positions get weight 0.",
    derivation=[
        r"s_j = -\infty \Rightarrow e^{s_j - m} = 0 \text{ exactly, as long as } m > -\infty",
        r"\text{nothing visible: } m = -\infty, \quad s_j - m = -\infty + \infty = \mathrm{NaN}",
    ],
    rule="Core: with the note's masks (causal, padding after the tokens) every masked weight is exactly 0 and the "
    "visible ones sum to 1. Beyond: with padding before the tokens too.",
)
def measure(sampler):
    s = 3 * sampler.normal(3, N, N)
    causal = regard.masks.causal(N)
    padding = regard.masks.padding(LENGTHS, N)[:, None, :]
    visible, left = causal & padding, causal & padding.flip(-1)  # the padding after the tokens, and before them
    w, blind = note(s, visible), note(s, left)
    before, ours = zeros(blind, ~left), regard.softmax(s, mask=left)
    q = sampler.normal(3, 1, N, 8)
    _, stats = regard.attention(q, q, q, is_causal=True, key_lengths=LENGTHS, return_stats=("visible_keys",))
    miscounted = gap(stats.visible_keys[:, 0], visible.sum(-1))
    return conclude(
        near("share of masked weights that are exactly 0", 1.0, zeros(w, ~visible), 1e-9),
        below("largest |Σ w − 1| over what is visible", 1e-6, gap(w.sum(-1), 1)),
        near("share of masked weights that are exactly 0, padding before the tokens", 1.0, before, 1e-9).beyond(),
        near("the same with regard.softmax(mask=…)", 1.0, zeros(ours, ~left), 1e-9).ours(),
        near("keys counted by regard.attention, minus the mask's", 0.0, miscounted, 1e-6).ours(),
        condition="every row sees at least one key. With padding before the tokens the first rows of a causal mask see "
        f"none: {int(blind.isnan().all(-1).sum())} of {3 * N} rows are NaN here; regard gives them zeros",
        alt=f"Weights of {N} causal queries whose last {N - LENGTHS[1]} keys are padding: zero above the "
        f"diagonal and from key {LENGTHS[1]} on.",
        figure=Figure("heat", "key", "query", rows=w[1].tolist()),
    )
