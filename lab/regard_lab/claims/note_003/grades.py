"""Five subjects on five scales: the shares are no weights, and one common factor cures nothing."""

import torch

import regard
from regard_lab.claim import Figure, above, claim, conclude, near

MARKS = torch.tensor([10.0, 80.0, 500.0, 4000.0, 20000.0], dtype=torch.float64)
LARGEST = torch.tensor([10.0, 100.0, 1000.0, 10000.0, 100000.0], dtype=torch.float64)
CLAIMED = [0.00009, 0.00072, 0.0045, 0.036, 0.18]
SUBJECTS = ["Chinese", "maths", "English", "physics", "chemistry"]


@claim(
    statement="Five subjects on five scales: the weights 0.00009, 0.00072, 0.0045, 0.036, 0.18 and what scaling does "
    "to the perfect mark.",
    derivation=[
        r"\sum_i x_i / \sum_i \max_i = 24590/111110 = 0.22 \ne 1",
        r"x_i/c \text{ keeps } x_i/x_j: \quad e^{(10 - 20000)/\sqrt 5} = 0",
    ],
    rule="Wrong if the weights do not sum to 1, are not the softmax's, or the common factor does not lift the "
    "perfect mark.",
)
def measure(sampler):
    shares = MARKS / LARGEST.sum()
    printed = zip(SUBJECTS, CLAIMED, shares, strict=True)
    weights = regard.softmax(MARKS)
    scaled = regard.softmax(MARKS / 5**0.5)
    own = regard.softmax(MARKS / LARGEST)
    series = {
        "claimed": (SUBJECTS, CLAIMED),
        "softmax of marks/√5": (SUBJECTS, scaled),
        "softmax, own scales": (SUBJECTS, own),
    }
    return conclude(
        near("sum of the five weights", 1.0, shares.sum(), 0.01),
        near("the softmax weight of chemistry", 0.18, weights[4], 0.005),
        above("weight of the perfect mark after a common factor 1/√5", 1e-3, scaled[0]),
        *(near(f"{name}: mark over 111110", c, x, 0.03 * c).ours() for name, c, x in printed),
        above("weight of the perfect mark, each mark over its own maximum", 0.2, own[0]).ours(),
        right="The five are marks over the sum of the maximal marks: arithmetic right, but they sum to "
        f"{shares.sum():.2f} and are not softmax, which gives (0, 0, 0, 0, 1). One common factor keeps the ratios of "
        f"scales: the perfect mark stays at 0. Each subject needs its own scale: its weight is then {own[0]:.2f}, the "
        "largest.",
        alt="Softmax of the marks, scaled by a common factor, puts all on chemistry; own scales put most on Chinese.",
        figure=Figure("bars", "subject", "weight", series),
    )
