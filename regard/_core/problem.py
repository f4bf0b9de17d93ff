"""`Problem`, one attention call after validation: what every backend receives, and what it returns.

Shapes: B batch, H query heads, G key heads (H a multiple of G), M queries, N keys, D and E head dims of k and v.

    s_ij = (cap(scale · q_i·k_j) + bias_ij + row_bias_i + relative_(j−i)) / temperature_i      over the visible keys j
           or score(scale · q_i·k_j, i, j, h, …) in the place of cap
    p_i  = normaliser(s_i)                                       with the sink's exp(sink) in the denominator
    o_i  = Σ_j dropout(p_ij) · v_j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard import normalizers, score_function
from regard._core.dtypes import accumulator
from regard.normalizers import Choice
from regard.score_function import ScoreFunction

TENSORS = (
    "q", "k", "v", "bias", "mask", "temperature", "sink", "key_lengths", "seed", "interval", "row_bias", "relative",
    "theta", "score_params",
)  # fmt: skip
OPTIONS_SCHEMA = (  # of what `Problem.flatten` returns
    "float scale, float softcap, str score, bool causal, SymInt left, SymInt right, float dropout_p, str normalizer, "
    "str stats"
)


class Kind:
    """The kind of call that a plan serves: one set of options, shapes, strides, dtypes and device, with noted facts."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}


@dataclass(slots=True)
class Problem:
    """The tensors of one call, brought to [B, H, M, D], and its options, resolved to numbers and flags."""

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, G, N, D]
    v: Tensor  # [B, G, N, E]
    choice: Choice
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None  # [B, H, M, N] floats, expanded (strides may be 0); −inf hides a key
    mask: Tensor | None = None  # [B, H, M, N] bool, expanded; True = visible
    temperature: Tensor | None = None  # [B, H, M], expanded; > 0
    sink: Tensor | None = None  # [B, H, M], expanded: a logit, after the temperature
    key_lengths: Tensor | None = None  # [B] int32: keys ≥ key_lengths[b] are hidden
    causal: bool = False  # query i sees keys ≤ i
    left: int | None = None  # query i sees keys ≥ i − left
    right: int | None = None  # query i sees keys ≤ i + right
    dropout_p: float = 0.0
    seed: Tensor | None = None  # [1] int64, on q's device
    stats: tuple[str, ...] = ()  # names, in the order of statistics.NAMES
    first_query: int = 0  # where q and k begin in the whole sequence, if they are pieces of it: causal order, window,
    first_key: int = 0  # key_lengths, distance and dropout count positions there
    queries: int | None = None  # of the whole sequence; None: q is whole
    kind: Kind | None = None  # shared by problems of one plan
    interval: Tensor | None = None  # [3, B, H, M] int32, expanded: lo, hi, position: query i sees keys lo ≤ j < hi only
    row_bias: Tensor | None = None  # [B, H, M] floats, expanded: added to every score of its row, beside `bias`
    relative: Tensor | None = None  # [H, M + N − 1] floats: relative[h, j − i + M − 1] is added to s_ij
    theta: Tensor | None = None  # [B, H, M], expanded: the normaliser's parameter, in the place of `choice.theta`
    score: ScoreFunction | None = None  # beside no soft cap; its own parameters are not read
    score_params: Tensor | None = None  # [P, H], accumulator dtype

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

    def block(self, first: int, last: int) -> Problem:
        """The problem of queries first … last − 1 alone; the caller keeps track of their positions."""
        last = min(last, self.q.shape[2])
        rows: dict[str, Any] = {"q": self.q[:, :, first:last]}
        for name in ("bias", "mask", "temperature", "sink", "theta"):
            whole = getattr(self, name)
            rows[name] = None if whole is None else whole[:, :, first:last]
        for name in ("interval", "row_bias"):
            whole = getattr(self, name)
            rows[name] = None if whole is None else whole[..., first:last]
        if self.relative is not None:
            after = self.q.shape[2] - last
            rows["relative"] = self.relative[:, after : after + last - first + self.k.shape[2] - 1]
        return replace(self, **rows)

    def without_tensors(self) -> Problem:
        """The options alone: what autograd keeps beside the tensors that it saves."""
        nothing: dict[str, Any] = dict.fromkeys(TENSORS)
        return replace(self, **nothing)

    def with_tensors(self, tensors: Sequence[Any]) -> Problem:
        """The options with tensors in the order of `TENSORS`; what may be broadcast is expanded here."""
        q, k, v, bias, mask, temperature, sink, key_lengths, seed, *others = tensors
        interval, row_bias, relative, theta, score_params = others
        rows = q.shape[:3]
        full = (*rows, k.shape[2])
        return Problem(  # `replace` would take three times as long
            q, k, v, self.choice, self.scale, self.softcap, _expand(bias, full), _expand(mask, full),
            _expand(temperature, rows), _expand(sink, rows), key_lengths, self.causal, self.left, self.right,
            self.dropout_p, seed, self.stats, self.first_query, self.first_key, self.queries, self.kind,
            _expand(interval, (3, *rows)), _expand(row_bias, rows), _expand(relative, (rows[1], -1)),
            _expand(theta, rows), self.score, score_params,
        )  # fmt: skip

    def flatten(self) -> tuple:
        """The options as `regard::attention` takes them after its tensors: −1 and 0 stand for None."""
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        spec, names, score = self.choice.spec, ",".join(self.stats), "" if self.score is None else self.score.key
        return self.scale, self.softcap or 0.0, score, self.causal, left, right, self.dropout_p, spec, names


def _expand(x: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if x is None else x.expand(shape)


def unflatten(tensors: Sequence[Tensor | None], options: Sequence) -> Problem:
    """The problem of what `Problem.flatten` gave and the tensors, not expanded."""
    scale, softcap, score, causal, left, right, dropout_p, normalizer, stats = options
    empty: Any = None
    template = Problem(
        empty, empty, empty, normalizers.get(normalizer), scale, softcap or None, causal=causal,
        left=None if left < 0 else left, right=None if right < 0 else right, dropout_p=dropout_p,
        stats=tuple(stats.split(",")) if stats else (), score=score_function.find(score) if score else None,
    )  # fmt: skip
    return template.with_tensors(tensors)


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
