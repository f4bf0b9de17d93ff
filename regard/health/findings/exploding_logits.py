"""Exploding logits: the largest q·k is beyond what published runs survived, or what the dtype can tell apart.

100 is where QK-clip (Kimi K2) steps in; runs whose logits passed 1e4 diverged (arXiv 2309.14322). A dtype with
machine ε holds numbers near L only in steps of ε·L: from ε·L = 1 on, logits a nat apart are the same number.
"""

from __future__ import annotations

import torch

from regard.health.findings._finding import finding

KIND = "exploding logits"
CLIP = 100.0
DIVERGED = 1e4


def limit(dtype: str) -> float:
    """Where it becomes critical: 1e4, or 1/ε of the dtype if that comes first."""
    kind = getattr(torch, dtype, None)
    return min(DIVERGED, 1.0 / torch.finfo(kind).eps) if isinstance(kind, torch.dtype) else DIVERGED


def size(head) -> float:
    """The largest |max_logit| of a row: a dtype is as coarse far below zero as above."""
    return max(head.statistics.max("max_logit"), -head.statistics.min("max_logit"))


def find(heads):
    found = [(head, size(head)) for head in heads]
    found = [(head, top) for head, top in found if top > CLIP]
    severity = "critical" if any(top > limit(head.dtype) for head, top in found) else "warning"
    return finding(
        KIND,
        severity,
        found,
        "A row's largest logit reaches {range} in size.",
        f"|max_logit| > {CLIP:g} (QK-clip, Kimi K2); critical beyond {DIVERGED:g} (arXiv 2309.14322) or 1/ε of the "
        "dtype",
        "Bound q·k: QK-norm, a soft cap (try what_if=['softcap=50', 'qk_norm']), QK-clip, a z-loss on logsumexp, or a "
        "lower learning rate; keep scores in float32.",
    )
