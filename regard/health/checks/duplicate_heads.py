"""Duplicate heads: two heads of a layer have the same distribution on row after row.

Rows are compared by entropy ratio, sharpness, logit variance and distance; two heads are twins if for each of them

    Σ (f_g − f_h)² < 0.005 · mean of Σ (f − f̄)²  over the rows,

0 for copies and about 2 for unrelated heads; 0.005 is a correlation above 0.997. Heads of trained layers are often
prunable (arXiv 1905.10650) but rarely equal row by row. Uniform rows and rows that a shared bias decides are equal
in any two heads, so these are not compared.
"""

from regard.health.checks.finding import Finding, Heads, is_from_bias, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.heads import TWINS

RULE = Rule(
    "RG305", "duplicate heads", "no two heads of a layer have the same rows", "warning", needs="attention calls",
    proves="Proves that two heads have the same distribution row by row on this text.",
    cause="The heads' weights were tied, copied or initialised alike.",
    fix="Remove one of each pair, or check that their weights were not tied or initialised alike.",
    references=("arXiv 1905.10650",),
)  # fmt: skip
RULES = (RULE,)
UNIFORM = 1e-8  # mean logit variance below which unrelated heads look equal
LISTED = 4  # pairs


def find(heads: Heads) -> list[Finding]:
    candidates = [head for head in heads if head.twins and head.can_be_judged and not is_from_bias([head])]
    found = [head for head in candidates if head.statistics.mean("logit_variance") > UNIFORM]
    pairs = sorted({(head.index, head.layer, *sorted((head.head, twin))) for head in found for twin in head.twins})
    listed = [f"{layer} heads {a} and {b}" for _, layer, a, b in pairs[:LISTED]] + ["…"] * (len(pairs) > LISTED)
    return make_finding(
        RULE, "warning", [(head, len(head.twins)) for head in found],
        f"Two heads have the same distribution in every row: {', '.join(listed)}.",
        f"squared difference < {TWINS:g} of the rows' variance in each of four features",
    )  # fmt: skip
