"""Statistics of rows of weights: definitions, and the sums that they are finished from.

A row has logits s_j over its visible keys and weights p_j = u_j / Z; p̄ = p / Σp. Everything below is finished from
a `State` of sums. The maximum is kept out of the sums (`ties` counts how often it occurs), so that a nearly one-hot
row loses nothing: with w = Σ_{j not max} u_j/u_max,

    entropy       = log(ties + w) − Σ' ũ·log ũ / (ties + w)        instead of lse − E[s], which cancels
    gradient_gain = tr ∂p/∂s from products of non-maximal terms     instead of 1 − Σp², which cancels

A row that sees no key has 0 throughout (its maximum and logsumexp −inf). A row with a NaN or +inf among its logits has
no weights: all but `visible_keys` and `max_logit` is NaN.

>>> import regard, torch
>>> s = torch.tensor([[30.0, 0.0, 0.0]])
>>> regard.statistics.of_scores(s)["gradient_gain"]
tensor([3.7430e-13])
"""

from __future__ import annotations

from regard.statistics.dense import of_scores, of_weights
from regard.statistics.names import (  # noqa: F401  # the names outside `__all__` are the library's own
    DIFFERENTIABLE,
    NAMES,
    ON_REQUEST,
    Statistics,
    detach_others,
    requested,
    resolve,
    stack,
    with_gradient_inputs,
)
from regard.statistics.state import State, Terms, solve_shift  # noqa: F401

__all__ = ["NAMES", "Statistics", "of_scores", "of_weights"]
