"""Dying gradient: on most rows almost no gradient passes back through the softmax.

q and k receive their gradient multiplied by the gradient gain, tr ∂p/∂s; a uniform row has 1 − 1/n. Below 1e-4 of that,
bfloat16 sums and Adam's ε lose it beside the gradients of other paths.
"""

from regard.health.checks.finding import Finding, Heads, exclude_positional, make_finding
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG303", "dying gradient", "gradients pass the softmax", "critical", needs="attention calls",
    proves="Proves that q and k of these rows receive almost no gradient on this text.",
    cause="Rows are one-hot, because the logits are too large.",
    fix="Check the 1/√d scale, and add QK-norm or a soft cap.",
    what_if=("qk_norm", "softcap=30"),
)  # fmt: skip
RULES = (RULE,)
GAIN = 1e-4  # of a uniform row's
SHARE, CRITICAL_SHARE = 0.5, 0.9  # of the rows


def find(heads: Heads) -> list[Finding]:
    found = []
    for head in exclude_positional(heads):
        mean, top = head.statistics.mean("gain_ratio"), head.statistics.max("gain_ratio")
        if mean < GAIN + (1.0 - SHARE) * top:  # necessary, and cheaper than the histogram
            share = head.statistics["gain_ratio"].share_below(GAIN)
            if share > SHARE:
                found.append((head, share))
    return make_finding(
        RULE, "critical" if any(share > CRITICAL_SHARE for _, share in found) else "warning", found,
        f"On {{percent}} of the rows the gradient gain is below {GAIN:g} of a uniform row's.",
        f"gradient gain < {GAIN:g} of a uniform row's on more than {SHARE:.0%} of the rows",
        "Make rows less one-hot during training: check the 1/√d scale, add QK-norm or a soft cap, or start with a "
        "temperature above 1 and lower it later.",
    )  # fmt: skip
