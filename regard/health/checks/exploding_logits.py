"""Exploding logits: the largest logit is beyond what published runs survived, or what the dtype resolves.

QK-clip (Kimi K2) acts from 100 on; runs whose logits passed 1e4 diverged (arXiv 2309.14322). Near L, a dtype with
machine ε has steps of ε·L: from L = 1/ε on, logits that differ by 1 are the same number.
"""

import torch

from regard.health.checks.finding import LOGIT_LIMIT, Finding, Heads, make_finding
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG301", "exploding logits", "logits stay within what the dtype resolves", "critical", needs="attention calls",
    proves="Proves the size of the logits on this text; a head may work with large logits for a while.",
    cause="The norms of q and k have grown without bound, or the scale 1/√d is missing.",
    fix="Bound q·k with QK-norm, a soft cap or QK-clip, and lower the learning rate.",
    references=("arXiv 2309.14322",),
    what_if=("qk_norm", "softcap=50"),
    explains=("RG302", "RG303"),
)  # fmt: skip
RULES = (RULE,)
DIVERGED = 1e4


def critical_limit(dtype: str) -> float:
    """The logit from which on the finding is critical: 1e4, or 1/ε of the dtype if that is less."""
    kind = getattr(torch, dtype, None)
    return min(DIVERGED, 1.0 / torch.finfo(kind).eps) if isinstance(kind, torch.dtype) else DIVERGED


def find(heads: Heads) -> list[Finding]:
    # of |max_logit|, because far below zero a dtype is as coarse as far above
    logits = ((head, max(head.statistics.max("max_logit"), -head.statistics.min("max_logit"))) for head in heads)
    found = [(head, logit) for head, logit in logits if logit > LOGIT_LIMIT]
    return make_finding(
        RULE, "critical" if any(logit > critical_limit(head.dtype) for head, logit in found) else "warning", found,
        "The largest logit of a row reaches {range} in absolute value.",
        f"|max_logit| > {LOGIT_LIMIT:g} (QK-clip, Kimi K2); critical > {DIVERGED:g} (arXiv 2309.14322) or 1/ε of the "
        "dtype",
        "Bound q·k with QK-norm, a soft cap (try what_if=['softcap=50', 'qk_norm']) or QK-clip; lower the learning "
        "rate; compute scores in float32.",
    )  # fmt: skip
