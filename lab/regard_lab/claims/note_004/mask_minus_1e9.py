"""−1e9 in place of −inf: the same, except where nothing is visible, and in float16."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, near


def fits(dtype):
    """Return 1 if −1e9 is finite in that type, else 0."""
    return float(torch.tensor(-1e9, dtype=torch.float64).to(dtype).isfinite())


@claim(
    statement="Filling masked scores with −1e9 does the same as −inf.",
    derivation=[
        r"e^{-10^9 - m} = 0 \text{ in floating point for every ordinary maximum } m",
        r"\text{all hidden: } m = -10^9, \quad w = e^0/n = 1/n",
    ],
    rule="Core: equal where a row sees a key. Beyond: rows that see none, and float16.",
)
def measure(sampler):
    s = 3 * sampler.normal(100, 8)
    visible = sampler.uniform(100, 8) > 0.4
    visible[:, 0] = True
    filled = regard.softmax(s.masked_fill(~visible, -1e9))
    infinite = regard.softmax(s.masked_fill(~visible, float("-inf")))
    nothing = torch.zeros(8, dtype=torch.bool)
    blind = regard.softmax(s[:1].masked_fill(~nothing, -1e9))
    truth = regard.softmax(s[:1], mask=nothing)
    series = {"filled with −1e9": (range(8), blind[0]), "masked (regard)": (range(8), truth[0])}
    return conclude(
        below("largest difference, every row sees a key", 1e-12, gap(filled, infinite)),
        below("weight on hidden keys in a row that sees none", 1e-12, blind.sum()).beyond(),
        near("−1e9 is finite in float16 (1: yes)", 1.0, fits(torch.float16), 0.5).beyond(),
        near("−1e9 is finite in bfloat16 (1: yes)", 1.0, fits(torch.bfloat16), 0.5).ours(),
        near("weight regard gives in a row that sees no key", 0.0, truth.sum(), 1e-300).ours(),
        condition="every row sees at least one key (else −1e9 spreads the weight evenly over hidden keys) and the "
        "type can hold −1e9 (float16 cannot: its largest number is 65504)",
        alt=f"In a row that sees no key, −1e9 gives every hidden key {blind.mean():.3f}; masking gives "
        f"{truth.mean():g}.",
        figure=Figure("bars", "key", "weight in a row that sees no key", series),
    )
