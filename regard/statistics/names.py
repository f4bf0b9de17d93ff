"""The fourteen statistics by name, and `Statistics`, what a call returns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from regard.normalizers import Choice
from regard.statistics.definitions import DEFINITIONS

NAMES = tuple(DEFINITIONS)
ON_REQUEST = ("top_key",)  # by name only: the reference computes them, no fused kernel does
COLUMNS = ("least", "median", "mean", "largest")  # of the table that a notebook shows
LEFT = "text-align: left; font-weight: normal"
RIGHT = "text-align: right; padding-left: 1.5em"
DIFFERENTIABLE = ("logit_variance", "logsumexp", "entropy")  # of the softmax family


class Statistics(MutableMapping):
    """Statistics by name, as `stats["entropy"]` or `stats.entropy`.

    Of softmax, softmax1 and sinks `entropy`, `logsumexp` and `logit_variance` carry gradients, in `attention` and
    `nn`; the others, and those of other normalisers, carry none (`requires_grad` is False).

    >>> stats = Statistics({"entropy": torch.zeros(2), "mass": torch.ones(2)})
    >>> stats
    Statistics(entropy, mass; each (2,))
    >>> stats.mass
    tensor([1., 1.])
    """

    def __init__(self, values: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = ()) -> None:
        self._values = dict(values)
        self._names: tuple[str, ...] = tuple(self._values)
        self._stacked: tuple[Tensor, tuple[str, ...], tuple[str, ...]] | None = None

    @classmethod
    def of_stacked(cls, stacked: Tensor, order: tuple[str, ...], names: tuple[str, ...], choice: Choice) -> Statistics:
        """The rows `names` of stacked [S, …], whose rows are `order`; each view is made when it is asked for."""
        stats = cls()
        stats._names = names
        stats._stacked = stacked, order, DIFFERENTIABLE if choice.softmax_family else ()
        return stats

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            if self._stacked is None or name not in self._names:
                raise KeyError(name)
            stacked, order, carries = self._stacked
            if name in carries and stacked.requires_grad and not torch.is_grad_enabled():
                with torch.inference_mode(False), torch.enable_grad():  # kept for later: its gradient may be wanted
                    self._values[name] = stacked[order.index(name)]
            else:
                found = stacked[order.index(name)]
                self._values[name] = found if name in carries else found.detach()
        return self._values[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._values[name] = value
        if name not in self._names:
            self._names = (*self._names, name)

    def __delitem__(self, name: str) -> None:
        self[name]  # a KeyError where there is none
        del self._values[name]
        self._names = tuple(other for other in self._names if other != name)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no statistic {name!r} was asked for; here: {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        shape = f"; each {tuple(next(iter(self.values())).shape)}" if self else ""
        return f"Statistics({', '.join(self)}{shape})"

    def _repr_html_(self) -> str:
        """A table of least, median, mean and largest, as notebooks show it."""
        return _make_table(self)

    def __reduce__(self) -> tuple:
        return Statistics, (dict(self),)


def _summarize(values: Tensor) -> list[str]:
    """Return least, median, mean and largest of the finite values as text; "–" if there is none."""
    finite = values.detach().double().cpu().flatten()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return ["–"] * len(COLUMNS)
    return [f"{float(x):.4g}" for x in (finite.min(), finite.median(), finite.mean(), finite.max())]


def _make_table(stats: Mapping[str, Tensor]) -> str:
    """Return one line per statistic: its name, and four numbers over all rows of queries."""
    rows = [("statistic", *COLUMNS), *((name, *_summarize(values)) for name, values in stats.items())]
    lines = "".join(_make_row(*row) for row in rows)
    shape = next((" × ".join(map(str, values.shape)) for values in stats.values()), "0")
    return f"<table><caption>Statistics of {shape} rows</caption>{lines}</table>"


def _make_row(name: str, *cells: str) -> str:
    numbers = "".join(f"<td style='{RIGHT}'>{cell}</td>" for cell in cells)
    return f"<tr><th style='{LEFT}'>{name}</th>{numbers}</tr>"


# so that torch.func and torch.export take what attention returns; the names are the tree's
register_pytree_node(
    Statistics,
    lambda stats: (list(stats.values()), tuple(stats)),
    lambda values, names: Statistics(zip(names, values, strict=True)),
    serialized_type_name="regard.Statistics",
)


def stack(stats: Mapping[str, Tensor]) -> Tensor:
    """All statistics in one tensor, [S, …] in the order of `NAMES`; the one they are views of, if there is one."""
    known = stats._stacked if isinstance(stats, Statistics) else None
    if known is not None and known[1] == NAMES:
        return known[0].contiguous()
    return torch.stack([stats[name] for name in NAMES])


def detach_others(stats: Mapping[str, Tensor], choice: Choice) -> dict[str, Tensor]:
    """Detach every statistic but those that are `DIFFERENTIABLE`, of the softmax family."""
    carries = DIFFERENTIABLE if choice.softmax_family else ()
    return {name: x if name in carries else x.detach() for name, x in stats.items()}


def with_gradient_inputs(names: tuple[str, ...], choice: Choice) -> tuple[str, ...]:
    """Add the statistics that the gradients of `names` are computed from, where a gradient is possible."""
    if not torch.is_grad_enabled() or not choice.softmax_family or not set(names) & set(DIFFERENTIABLE):
        return names
    return resolve((*names, "visible_keys", "mean_logit", "logsumexp", "mass", "entropy"))


def requested(wanted: bool | str | Iterable[str]) -> tuple[str, ...] | None:
    """The statistics that `return_stats` asks for; None if it asks for none, () if for an empty result."""
    return None if wanted is False or wanted is None else resolve(wanted)


def resolve(wanted: bool | str | Iterable[str]) -> tuple[str, ...]:
    """The statistics asked for, in the table's order: True is all fourteen, a tuple of names those."""
    if wanted is True:
        return NAMES
    if wanted is False or wanted is None:
        return ()
    if not isinstance(wanted, (str, tuple, list, set, frozenset)):
        raise TypeError(f"return_stats must be True, False, a name or a tuple of names, got {wanted!r}")
    wanted = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    known = (*NAMES, *ON_REQUEST)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"return_stats: unknown statistic {name!r}; {hint}")
    return tuple(name for name in known if name in wanted)
