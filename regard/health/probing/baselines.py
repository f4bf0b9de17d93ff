"""What a text's own frequencies predict: the loss of unigrams and of bigrams, each token left out of its own count.

>>> from regard.health.probing.baselines import frequency_losses
>>> ids = torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2]])
>>> unigram, bigram = frequency_losses(ids[:, :-1], ids[:, 1:], vocabulary=4)
>>> bigram < unigram < math.log(4)
True
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequency_losses(previous: Tensor, targets: Tensor, vocabulary: int) -> tuple[float, float]:
    """(unigram, bigram) loss in nats of `targets` after `previous`, integer tensors of one shape.

    Unigram: (1 − λ)·(c(w) − 1)/(n − 1) + λ/V, with λ = (tokens seen once)/n, after Good and Turing. Bigram: (1 − μ)·
    (c(u, w) − 1)/(c(u) − 1) + μ·unigram, with μ = types after u / (types after u + c(u) − 1), after Witten and Bell.
    """
    u, w = previous.flatten(), targets.flatten()
    n = len(w)
    if n < 2:
        return math.log(vocabulary), math.log(vocabulary)
    counts = _counts(w)
    unseen = max(float((counts == 1).sum()), 1.0) / n
    unigram = (1 - unseen) * (counts - 1) / (n - 1) + unseen / vocabulary
    pair = u.long() * (int(w.max()) + 1) + w
    pairs, place = pair.unique(return_inverse=True)
    pair_counts = torch.bincount(place).double()[place]
    contexts, context = u.unique(return_inverse=True)
    context_counts = torch.bincount(context).double()[context]
    first = torch.zeros(len(pairs), dtype=torch.long, device=u.device).scatter_(0, place, context)  # of each pair
    kinds = torch.bincount(first, minlength=len(contexts)).double()[context]
    rest = (context_counts - 1).clamp_min(1e-9)
    back_off = torch.where(context_counts > 1, kinds / (kinds + context_counts - 1), 1.0)
    bigram = (1 - back_off) * (pair_counts - 1) / rest + back_off * unigram
    return float(-unigram.log().mean()), float(-bigram.log().mean())


def _counts(ids: Tensor) -> Tensor:
    """How often each id occurs, at every place, float64."""
    _, place = ids.unique(return_inverse=True)
    return torch.bincount(place).double()[place]
