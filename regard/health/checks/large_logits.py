"""Logits that are too large: beyond what published runs survived, rows of one key, and gradients that do not pass.

QK-clip (Kimi K2) acts from 100 on; runs whose logits passed 1e4 diverged (arXiv 2309.14322). Near L, a dtype with
machine ε has steps of ε·L: from L = 1/ε on, logits that differ by 1 are the same number. q and k receive their
gradient multiplied by the gradient gain, tr ∂p/∂s; a uniform row has 1 − 1/n. Below 1e-4 of that, bfloat16 sums and
Adam's ε lose it beside the gradients of other paths. A healthy sharp head still has some rows that spread, so the
rule is on the 95th percentile of the entropy ratio. At 128 keys a ratio of 0.02 is about 98 % of the weight on one
key. Entropy collapse: Zhai et al. 2023, arXiv 2303.06296.
"""

import torch

from regard.health.checks.finding import LOGIT_LIMIT, Finding, Heads, exclude_positional, make_finding
from regard.health.checks.rule import Rule

EXPLODING = Rule(
    "RG301", "exploding logits", "logits stay within what the dtype resolves", "critical", needs="attention calls",
    proves="Proves the size of the logits on this text; a head may work with large logits for a while.",
    cause="The norms of q and k have grown without bound, or the scale 1/√d is missing.",
    fix="Bound q·k with QK-norm, a soft cap or QK-clip, and lower the learning rate.",
    references=("arXiv 2309.14322",),
    what_if=("qk_norm", "softcap=50"),
    explains=("RG302", "RG303"),
)  # fmt: skip
DIVERGED = 1e4


def critical_limit(dtype: str) -> float:
    """The logit from which on the finding is critical: 1e4, or 1/ε of the dtype if that is less."""
    kind = getattr(torch, dtype, None)
    return min(DIVERGED, 1.0 / torch.finfo(kind).eps) if isinstance(kind, torch.dtype) else DIVERGED


def find_exploding(heads: Heads) -> list[Finding]:
    # of |max_logit|, because far below zero a dtype is as coarse as far above
    logits = ((head, max(head.statistics.max("max_logit"), -head.statistics.min("max_logit"))) for head in heads)
    found = [(head, logit) for head, logit in logits if logit > LOGIT_LIMIT]
    return make_finding(
        EXPLODING, "critical" if any(logit > critical_limit(head.dtype) for head, logit in found) else "warning", found,
        "The largest logit of a row reaches {range} in absolute value.",
        f"|max_logit| > {LOGIT_LIMIT:g} (QK-clip, Kimi K2); critical > {DIVERGED:g} (arXiv 2309.14322) or 1/ε of the "
        "dtype",
        "Bound q·k with QK-norm, a soft cap (try what_if=['softcap=50', 'qk_norm']) or QK-clip; lower the learning "
        "rate; compute scores in float32.",
    )  # fmt: skip


COLLAPSED = Rule(
    "RG302", "collapsed", "rows spread their weight", "critical", needs="attention calls",
    proves="Proves that nearly every row on this text has one key; it does not prove that training caused it.",
    cause="Entropy collapse: the logits of q and k outgrew the softmax.",
    fix="Go back to a checkpoint from before, and train with warm-up and QK-norm or a soft cap.",
    references=("arXiv 2303.06296",),
    what_if=("qk_norm", "softcap=30"),
    explains=("RG303",),
)  # fmt: skip
RATIO = 0.02


def find_collapsed(heads: Heads) -> list[Finding]:
    found = []
    for head in exclude_positional(heads):
        if head.statistics.mean("entropy_ratio") < RATIO + 0.05:  # necessary, and cheaper than a quantile
            high = head.statistics["entropy_ratio"].quantile(0.95)
            if high < RATIO:
                found.append((head, high))
    return make_finding(
        COLLAPSED, "critical", found,
        "Nearly every row puts all its weight on one key: the 95th percentile of the entropy ratio is {range}.",
        f"95th percentile of entropy_ratio < {RATIO} (entropy collapse, arXiv 2303.06296)",
        "If it happened in training, go back to a checkpoint from before; train with warm-up and QK-norm from the "
        "start, or with a soft cap (try what_if=['qk_norm', 'softcap=30']). Later remedies recover only a part.",
    )  # fmt: skip


DYING = Rule(
    "RG303", "dying gradient", "gradients pass the softmax", "critical", needs="attention calls",
    proves="Proves that q and k of these rows receive almost no gradient on this text.",
    cause="Rows are one-hot, because the logits are too large.",
    fix="Check the 1/√d scale, and add QK-norm or a soft cap.",
    what_if=("qk_norm", "softcap=30"),
)  # fmt: skip
GAIN = 1e-4  # of a uniform row's
SHARE, CRITICAL_SHARE = 0.5, 0.9  # of the rows


def find_dying(heads: Heads) -> list[Finding]:
    found = []
    for head in exclude_positional(heads):
        mean, top = head.statistics.mean("gain_ratio"), head.statistics.max("gain_ratio")
        if mean < GAIN + (1.0 - SHARE) * top:  # necessary, and cheaper than the histogram
            share = head.statistics["gain_ratio"].share_below(GAIN)
            if share > SHARE:
                found.append((head, share))
    return make_finding(
        DYING, "critical" if any(share > CRITICAL_SHARE for _, share in found) else "warning", found,
        f"On {{percent}} of the rows the gradient gain is below {GAIN:g} of a uniform row's.",
        f"gradient gain < {GAIN:g} of a uniform row's on more than {SHARE:.0%} of the rows",
        "Make rows less one-hot during training: check the 1/√d scale, add QK-norm or a soft cap, or start with a "
        "temperature above 1 and lower it later.",
    )  # fmt: skip


RULES = (EXPLODING, COLLAPSED, DYING)


def find(heads: Heads) -> list[Finding]:
    return [*find_exploding(heads), *find_collapsed(heads), *find_dying(heads)]
