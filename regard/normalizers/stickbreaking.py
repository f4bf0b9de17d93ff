"""stickbreaking(s)_j = σ(s_j)·∏_{k > j} (1 − σ(s_k)): each key, the last first, takes its share of what is left.

>>> import regard, torch
>>> regard.normalize(torch.tensor([0.0, 0.0, 0.0]), "stickbreaking")
tensor([0.1250, 0.2500, 0.5000])

It is the only map here that depends on the order of the keys: recent ones come first, as in causal order, and there is
no need of positions. What no key takes is lost, so a row sums to 1 − ∏ (1 − σ(s_k)).
"""

import torch
from torch.nn.functional import logsigmoid, pad, softplus

from regard.normalizers._record import Normalizer


def reference(scores, visible, theta):
    seen = scores > float("-inf") if visible is None else visible & (scores > float("-inf"))
    seen = seen | scores.isnan() if visible is None else seen | (scores.isnan() & visible)
    s = scores.masked_fill(~seen, 0.0)
    kept = -softplus(s).masked_fill(~seen, 0.0)  # log(1 − σ(s_k))
    later = pad(kept[..., 1:], (0, 1)) if s.shape[-1] else kept
    left = later.flip(-1).cumsum(-1).flip(-1)  # Σ_{k > j}
    return torch.exp(logsigmoid(s) + left).masked_fill(~seen, 0.0)


def trace(scores, visible, theta):
    """Σ_j ∂p_j/∂s_j = Σ p_j·(1 − σ(s_j))."""
    return (reference(scores, visible, theta) * torch.sigmoid(-scores)).sum(-1)


class StickBreaking(Normalizer):
    def cold(self, scores, visible, theta):
        """σ is a step: all to the last key above 0."""
        far = torch.sign(scores) * torch.finfo(scores.dtype).max
        return self.reference(far, visible, theta)


normalizer = StickBreaking(
    name="stickbreaking",
    formula="σ(s_j)·∏_{k > j} (1 − σ(s_k))",
    sums_to="≤ 1",
    sparse=False,
    paper="Tan et al. 2024, arXiv 2410.17980",
    use_when="translation (+1.1 BLEU); no kernel yet",
    reference=reference,
    fused=False,
    ordered=True,
    trace=trace,
)
