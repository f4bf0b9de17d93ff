"""The fourteen statistics by name: which exist, which of them a call asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

NAMES = (
    "visible_keys",
    "max_logit",
    "mean_logit",
    "logit_variance",
    "logsumexp",
    "mass",
    "entropy",
    "effective_keys",
    "participation",
    "max_weight",
    "support",
    "distance",
    "first_key_mass",
    "gradient_gain",
)
DIFFERENTIABLE = ("logit_variance", "logsumexp", "entropy")  # of the softmax family


class Statistics(dict):
    """Statistics by name, as `stats["entropy"]` or `stats.entropy`.

    Of softmax, softmax1 and sinks `entropy`, `logsumexp` and `logit_variance` carry gradients, in `attention` and
    `nn`; the others, and those of other normalisers, carry none (`requires_grad` is False).
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no statistic {name!r} was asked for; here: {', '.join(self)}") from None


# so that torch.func and torch.export take what attention returns; the names are the tree's
register_pytree_node(
    Statistics,
    lambda stats: (list(stats.values()), tuple(stats)),
    lambda values, names: Statistics(zip(names, values, strict=True)),
    serialized_type_name="regard.Statistics",
)


def marked(stats: dict[str, Tensor], choice) -> dict[str, Tensor]:
    """Only those that are `DIFFERENTIABLE`, of the softmax family, carry gradients; the others are detached."""
    carries = DIFFERENTIABLE if choice.softmax_family else ()
    return {name: x if name in carries else x.detach() for name, x in stats.items()}


def with_helpers(names: tuple[str, ...], choice) -> tuple[str, ...]:
    """With the statistics that the gradients of these are made of, where a gradient is possible."""
    if not torch.is_grad_enabled() or not choice.softmax_family or not set(names) & set(DIFFERENTIABLE):
        return names
    return resolve((*names, "visible_keys", "mean_logit", "logsumexp", "mass", "entropy"))


def asked(wanted: bool | str | Iterable[str]) -> tuple[str, ...] | None:
    """The statistics asked for, as `resolve` has them; None where nobody asks: of () an empty answer is due."""
    return None if wanted is False or wanted is None else resolve(wanted)


def resolve(wanted: bool | str | Iterable[str]) -> tuple[str, ...]:
    """The statistics asked for, in the table's order: True is all, a tuple of names those."""
    if wanted is True:
        return NAMES
    if wanted is False or wanted is None:
        return ()
    if not isinstance(wanted, (str, tuple, list, set, frozenset)):
        raise TypeError(f"return_stats must be True, False, a name or a tuple of names, got {wanted!r}")
    wanted = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in wanted:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(NAMES)}"
            raise ValueError(f"return_stats: unknown statistic {name!r}; {hint}")
    return tuple(name for name in NAMES if name in wanted)
