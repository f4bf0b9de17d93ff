"""`Problem`, one attention call after validation: what every backend receives, and what it returns.

Shapes: B batch, H query heads, G key heads (H a multiple of G), M queries, N keys, D and E head dims of k and v.

    s_ij = (cap(scale · q_i·k_j) + bias_ij + row_bias_i + relative_(j−i)) / temperature_i      over the visible keys j
           or score(scale · q_i·k_j, i, j, h, …) in the place of cap
    p_i  = normaliser(s_i)                                       with the sink's exp(sink) in the denominator
    o_i  = Σ_j dropout(p_ij) · v_j
"""

# ruff: noqa: RUF009  # every default is made once, by a function that adds the field's mark
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import normalizers
from regard._call import score_function
from regard._call.score_function import ScoreFunction
from regard._facts import accumulator
from regard.normalizers import Choice


class Mark(NamedTuple):
    """What the library has to know of a field of `Problem`; every list of fields is made from these marks."""

    words: str = ""  # the option in a sentence: "cannot compute a soft cap"
    over: str | None = None  # of a tensor: what it is expanded over, a key of `Problem.sizes`; "": it stays as it is
    learned: bool = False  # a tensor that gradients may be asked of
    wire: tuple[str, Callable, Callable] | None = None  # of an option: its type in the op's schema, to and from it


def _same(x: Any) -> Any:
    return x


def _tensor(words: str = "", over: str = "", learned: bool = False, **default: Any) -> Any:
    return field(metadata=dict(mark=Mark(words, over, learned)), **default)


def _optional(words: str, over: str = "", learned: bool = False) -> Any:
    return _tensor(words, over, learned, default=None)


def _option(kind: str = "", to: Callable = _same, back: Callable = _same, words: str = "", **default: Any) -> Any:
    return field(metadata=dict(mark=Mark(words, wire=(kind, to, back) if kind else None)), **default)


def _side_to(side: int | None) -> int:
    return -1 if side is None else side


def _side_back(side: int) -> int | None:
    return None if side < 0 else side


def _cap_to(cap: float | None) -> float:
    return cap or 0.0


def _cap_back(cap: float) -> float | None:
    return cap or None


def _names_to(names: tuple[str, ...]) -> str:
    return ",".join(names)


def _names_back(names: str) -> tuple[str, ...]:
    return tuple(names.split(",")) if names else ()


def _score_to(score: ScoreFunction | None) -> str:
    return "" if score is None else score.key


def _score_back(key: str) -> ScoreFunction | None:
    return score_function.find(key) if key else None


def _choice_to(choice: Choice) -> str:
    return choice.spec


@dataclass(slots=True)
class Problem:
    """The tensors of one call, brought to [B, H, M, D], and its options, resolved to numbers and flags.

    A new field needs a mark: `_tensor` or `_optional` for a tensor, `_option` for anything else. Keys of calls seen
    before, the custom op, autograd and the texts of refusals know the field by it.
    """

    q: Tensor = _tensor()  # [B, H, M, D]
    k: Tensor = _tensor()  # [B, G, N, D]
    v: Tensor = _tensor()  # [B, G, N, E]
    choice: Choice = _option("str", _choice_to, normalizers.get)
    scale: float = _option("float")
    softcap: float | None = _option("float", _cap_to, _cap_back, "a soft cap", default=None)
    bias: Tensor | None = _optional("a bias", "scores", learned=True)  # [B, H, M, N] floats; −inf hides a key
    mask: Tensor | None = _optional("a dense mask", "scores")  # [B, H, M, N] bool; True = visible
    temperature: Tensor | None = _optional("a temperature per query", "rows", learned=True)  # [B, H, M]; > 0
    sink: Tensor | None = _optional("a sink", "rows", learned=True)  # [B, H, M]: a logit, after the temperature
    key_lengths: Tensor | None = _optional("key lengths")  # [B] int32: keys ≥ key_lengths[b] are hidden
    causal: bool = _option("bool", default=False)  # query i sees keys ≤ i
    left: int | None = _option("SymInt", _side_to, _side_back, "a window", default=None)  # i sees keys ≥ i − left
    right: int | None = _option("SymInt", _side_to, _side_back, "a window", default=None)  # i sees keys ≤ i + right
    dropout_p: float = _option("float", words="dropout", default=0.0)
    seed: Tensor | None = _optional("")  # [1] int64, on q's device
    stats: tuple[str, ...] = _option("str", _names_to, _names_back, "statistics", default=())  # in the order of NAMES
    first_query: int = _option(default=0)  # where q and k begin in the whole sequence, if they are pieces of it: causal
    first_key: int = _option(default=0)  # order, window, key_lengths, distance and dropout count positions there
    queries: int | None = _option(default=None)  # of the whole sequence; None: q is whole
    interval: Tensor | None = _optional("an interval of keys per query", "interval")  # [3, B, H, M] int32: lo, hi,
    # position: query i sees keys lo ≤ j < hi only
    row_bias: Tensor | None = _optional("a bias per query", "rows", learned=True)  # [B, H, M], beside `bias`
    relative: Tensor | None = _optional("a bias by relative position", "heads", learned=True)  # [H, M + N − 1] floats:
    # relative[h, j − i + M − 1] is added to s_ij
    theta: Tensor | None = _optional("a parameter per query", "rows", learned=True)  # [B, H, M], for `choice.theta`
    score: ScoreFunction | None = _option("str", _score_to, _score_back, "a score function", default=None)  # beside
    # no soft cap; its own parameters are not read
    score_params: Tensor | None = _optional("params of score_mod")  # [P, H], accumulator dtype
    kind: Hashable = _option(default=None)  # stands for all options in keys; problems of one plan share it

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(left, right) with causal order folded in: query i sees keys i − left … i + right."""
        right = self.right
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return self.left, right

    @property
    def span(self) -> int:
        """The largest number of keys that a row may see, as far as the host knows."""
        (left, right), keys = self.reach, self.k.shape[-2]
        return keys if left is None or right is None else min(keys, left + right + 1)

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of sums and row states."""
        return accumulator(self.q.dtype)

    @property
    def key(self) -> Hashable:
        """What a kernel is chosen by, beside the tensors: every option."""
        return options_of(self) if self.kind is None else self.kind

    def block(self, first: int, last: int) -> Problem:
        """The problem of queries first … last − 1 alone; the caller keeps track of their positions."""
        last = min(last, self.q.shape[2])
        after = self.q.shape[2] - last
        cuts: dict[str, Any] = dict(
            rows=(..., slice(first, last)),
            interval=(..., slice(first, last)),
            scores=(..., slice(first, last), slice(None)),
            heads=(..., slice(after, after + last - first + self.k.shape[2] - 1)),
        )
        found = {name: getattr(self, name)[cuts[over]] for name, over in EXPANDED if getattr(self, name) is not None}
        return replace(self, q=self.q[:, :, first:last], **found)

    def without_tensors(self) -> Problem:
        """The options alone: what autograd keeps beside the tensors that it saves."""
        nothing: dict[str, Any] = dict.fromkeys(TENSORS)
        return replace(self, **nothing)

    def with_tensors(self, tensors: Sequence[Any]) -> Problem:
        """The options with tensors in the order of `TENSORS`; what may be broadcast is expanded here."""
        found: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        found.update(zip(TENSORS, tensors, strict=True))
        rows, keys = found["q"].shape[:3], found["k"].shape[2]
        sizes: dict[str, Any] = dict(rows=rows, scores=(*rows, keys), interval=(3, *rows), heads=(rows[1], -1))
        for name, over in EXPANDED:
            if found[name] is not None:
                found[name] = found[name].expand(sizes[over])
        return Problem(**found)  # `replace` would take three times as long

    def flatten(self) -> tuple:
        """The options as `regard::attention` takes them after its tensors."""
        return tuple([to(getattr(self, name)) for name, (_, to, _) in WIRED])


def find_mark(one: Any) -> Mark:
    """The mark of a field; a field without one is refused, because keys would not know it."""
    if "mark" not in one.metadata:
        raise TypeError(f"Problem.{one.name} has no mark: declare it by _tensor, _optional or _option")
    return one.metadata["mark"]


MARKS = {one.name: find_mark(one) for one in fields(Problem)}
DEFAULTS = {one.name: one.default for one in fields(Problem)}
TENSORS = tuple(name for name, mark in MARKS.items() if mark.over is not None)
OPTIONS = tuple(name for name in MARKS if name not in TENSORS)
EXPANDED = tuple((name, mark.over) for name, mark in MARKS.items() if mark.over)
OPTIONAL = tuple(name for name, mark in MARKS.items() if mark.learned)  # inputs that may have gradients
WIRED = tuple((name, mark.wire) for name, mark in MARKS.items() if mark.wire is not None)
OPTIONS_SCHEMA = ", ".join(f"{wire[0]} {name}" for name, wire in WIRED)  # of what `Problem.flatten` returns
options_of, tensors_of = attrgetter(*OPTIONS), attrgetter(*TENSORS)


def unflatten(tensors: Sequence[Tensor | None], options: Sequence) -> Problem:
    """The problem of what `Problem.flatten` gave and the tensors, not expanded."""
    empty: Any = None
    found = {name: back(value) for (name, (_, _, back)), value in zip(WIRED, options, strict=True)}
    return Problem(empty, empty, empty, **found).with_tensors(tensors)


def find_option(p: Problem, *names: str) -> str | None:
    """Name the first of these fields that the call has, in words; None if it has none of them."""
    for name in names:
        x, default = getattr(p, name), DEFAULTS[name]
        if x is not default and (isinstance(x, Tensor) or x != default):
            return MARKS[name].words
    return None


@dataclass
class Forward:
    """`shift` and `z` are the row state that backward needs.

    ratio: shift = m, z = Z (0 where the row has no weight); threshold: shift = τ (in gain·s), z = Σg′;
    pointwise: both 0. Rows that see no key: o = 0, shift = 0, z = 0.
    """

    o: Tensor  # [B, H, M, E], q's dtype
    shift: Tensor  # [B, H, M], accumulator dtype
    z: Tensor  # [B, H, M], accumulator dtype
    stats: Tensor  # [len(problem.stats), B, H, M], accumulator dtype


@dataclass
class Gradients:
    """The result of backward; fields that were not asked for, or have no such input, are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # in the shape of the *unexpanded* bias
    temperature: Tensor | None = None  # [B, H, M]
    sink: Tensor | None = None  # [B, H, M]
    row_bias: Tensor | None = None  # [B, H, M]
    relative: Tensor | None = None  # [H, M + N − 1]
    theta: Tensor | None = None  # [B, H, M]


@dataclass
class Upstream:
    """The input of backward beside the problem and its `Forward`."""

    o: Tensor  # do, [B, H, M, E]
    stats: dict[str, Tensor] = field(default_factory=dict)  # gradients of entropy, logsumexp, logit_variance: [B, H, M]
    bias: bool = False  # is the bias's gradient wanted?
    temperature: bool = False
    sink: bool = False
    row_bias: bool = False
    relative: bool = False
    theta: bool = False


@dataclass
class Along:
    """Tangents of q, k and v, the direction of forward mode; None: that tensor has none."""

    q: Tensor | None = None  # [B, H, M, D]
    k: Tensor | None = None  # [B, G, N, D]
    v: Tensor | None = None  # [B, G, N, E]


@dataclass
class Part:
    """Sums of rows over a part of their keys, before sinks and rests; `regard.parallel.merge` has the merge law.

    ratio: o = Σu·v / z and z = Σv in the shift m (z = 0: the part weighs nothing). pointwise: o = Σp·v.
    """

    o: Tensor  # [B, H, M, E], accumulator dtype
    m: Tensor  # [B, H, M], accumulator dtype
    z: Tensor  # [B, H, M], accumulator dtype


@dataclass
class Whole:
    """Row numbers that backward of a part takes from the whole rows, each [B, H, M] in the accumulator's dtype.

    ds = a·dp − b·δ
    """

    m: Tensor
    z: Tensor
    delta: Tensor
    o: Tensor  # [B, H, M, E], what δ is made of, for kernels that make it
