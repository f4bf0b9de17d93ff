"""`Mask`: which keys each query sees, as one interval per query, without an N × N tensor.

>>> import regard, torch
>>> mask = regard.Mask.documents(cu_seqlens=[0, 2, 5]) & regard.Mask.causal()
>>> mask.dense(5, 5).int()
tensor([[1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1]], dtype=torch.int32)
>>> x = torch.randn(1, 2, 5, 8)
>>> ours, dense = regard.attention(x, x, x, mask), regard.attention(x, x, x, mask.dense(5, 5))
>>> bool(torch.allclose(ours, dense, atol=1e-6))
True
"""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from regard._call.mask.parts import (
    PLANNED,
    SHARED,
    UNLIMITED,
    Bounds,
    Chunks,
    Cumulative,
    Documents,
    Intervals,
    Lengths,
    Padding,
    Part,
    Prefix,
    Window,
    as_integers,
    check_cu_seqlens,
    check_side,
    reach_of,
    runs,
    shape_of,
)
from regard._facts import has_no_values
from regard.masks import interval

Ints = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Query i sees the keys lo_i ≤ j < hi_i: parts made by the class methods, combined by `&`.

    A mask has no size of its own: it takes that of q and k where it meets them. `attn_mask=` of `regard.attention` and
    its relatives takes one, alone or as a pair (mask, bias). `dense` gives the bool tensor. A mask keeps the numbers
    that it was made of: after a change of `cu_seqlens` or `lengths` in place make a new one.
    """

    parts: tuple[Part, ...] = ()

    @classmethod
    def causal(cls, bottom_right: bool = False) -> Mask:
        """Query i sees keys ≤ i, or with `bottom_right` keys ≤ i + Lk − Lq: the last query sees all, as behind a cache.

        Statistics of a mask that is aligned at the bottom right count `distance` from i + Lk − Lq.
        """
        return cls((Window(None, 0, _flag(bottom_right, "bottom_right")),))

    @classmethod
    def window(cls, left: int | None, right: int | None, bottom_right: bool = False) -> Mask:
        """Query i sees keys i − left … i + right (None: no limit); `bottom_right` counts from i + Lk − Lq."""
        left, right = (check_side(x, f"{name} of Mask.window") for x, name in ((left, "left"), (right, "right")))
        return cls((Window(left, right, _flag(bottom_right, "bottom_right")),))

    @classmethod
    def lengths(cls, lengths: Ints) -> Mask:
        """Batch entry b shows its first lengths[b] keys, as `key_lengths` does; lengths are (B,)."""
        return cls((Lengths(_per_entry(lengths, "lengths")),))

    @classmethod
    def padding(cls, mask: Tensor) -> Mask:
        """Batch entry b shows the keys where mask[b] is True: (B, N) bools, padded on the left or the right.

        Raises:
            ValueError: The visible keys of an entry do not lie side by side.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
            came = shape_of(mask) + f" {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask of Mask.padding must be a bool tensor (B, N), True = visible, got {came}")
        keys, counts = mask.shape[1], mask.sum(-1)
        positions = torch.arange(keys, device=mask.device)
        lo = torch.where(mask, positions, keys).amin(-1) if keys else counts
        hi = torch.where(mask, positions + 1, 0).amax(-1) if keys else counts
        lo, known = lo.clamp_max(hi), not has_no_values(mask)
        if known and bool((hi - lo != counts).any()):
            raise ValueError(
                "mask of Mask.padding must show one run of keys per batch entry, but one has holes: no interval. Pass "
                "it as a dense mask: attn_mask=mask[:, None, None, :]"
            )
        return cls((Padding(lo, hi, keys, known and not bool(lo.any())),))

    @classmethod
    def documents(cls, cu_seqlens: Ints | None = None, *, ids: Ints | None = None) -> Mask:
        """Query i sees the keys of its own document; `& Mask.causal()` makes it causal within each.

        Args:
            cu_seqlens: where the documents of a packed sequence begin and end, (documents + 1,): 0, …, tokens.
            ids: or the document of each token, (N,) or (B, N); equal ids lie side by side.
        """
        if (cu_seqlens is None) == (ids is None):
            raise ValueError("Mask.documents takes cu_seqlens or ids, one of them")
        if cu_seqlens is not None:
            cu = check_cu_seqlens(cu_seqlens, "cu_seqlens")
            if has_no_values(cu):
                return cls((Cumulative(cu, None, (None, None)),))
            ends = cu.tolist()
            longest = max((b - a for a, b in itertools.pairwise(ends)), default=0)
            return cls((Cumulative(cu, ends[-1], reach_of(longest)),))
        assert ids is not None
        ids = as_integers(ids, "ids")
        if ids.ndim not in (1, 2):
            raise ValueError(f"ids must have shape (N,) or (B, N), got {shape_of(ids)}")
        return cls((Documents(*runs(ids)),))

    @classmethod
    def prefix(cls, lengths: Ints | int, bottom_right: bool = False) -> Mask:
        """Prefix-LM: the first lengths[b] keys are visible to every query, the rest is causal; (B,) or an int."""
        lengths = as_integers(lengths, "lengths")
        lengths = _per_entry(lengths, "lengths") if lengths.ndim else lengths
        return cls((Prefix(lengths, _flag(bottom_right, "bottom_right")),))

    @classmethod
    def chunks(cls, size: int) -> Mask:
        """Query i sees the keys of its own chunk of `size`: ⌊i/size⌋·size … ⌊i/size⌋·size + size − 1."""
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"size of Mask.chunks must be an int ≥ 1, got {size!r}")
        return cls((Chunks(min(int(size), UNLIMITED)),))

    @classmethod
    def intervals(cls, lo: Ints, hi: Ints) -> Mask:
        """Query i sees keys lo_i ≤ j < hi_i; ints in 0 … Lk that broadcast to (B, H, Lq). lo ≥ hi: it sees none."""
        lo, hi = as_integers(lo, "lo"), as_integers(hi, "hi")
        if lo.device != hi.device:
            raise ValueError(f"lo and hi must be on one device, got {lo.device} and {hi.device}")
        return cls((Intervals(lo, hi),))

    def __and__(self, other: object) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(
                f"{self!r} & {type(other).__name__}: a Mask combines with a Mask; with a dense mask, & that with "
                "mask.dense(queries, keys)"
            )
        return Mask(self.parts + other.parts)

    def __or__(self, other: object) -> NoReturn:
        self._refuse(f"{self!r} | {other!r}", "a.dense(queries, keys) | b.dense(queries, keys)")

    __ror__ = __or__
    __rand__ = __and__

    def __invert__(self) -> NoReturn:
        self._refuse(f"~{self!r}", "~mask.dense(queries, keys)")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise TypeError(f"{what} is no interval of keys for every query; combine the dense masks: {instead}")

    @property
    def has_plan(self) -> bool:
        """True if calls with such a mask keep their plan."""
        return all(isinstance(part, PLANNED) for part in self.parts)

    @property
    def is_shared(self) -> bool:
        """True if all batch entries see the same keys, whatever the values are."""
        return all(isinstance(part, SHARED) for part in self.parts)

    def bounds(self, queries: int, keys: int, device: torch.device) -> Bounds:
        """(lo, hi), each None or ints that broadcast to (B, H, queries); not clipped to 0 … keys."""
        los: list[Tensor] = []
        his: list[Tensor] = []
        for part in self.parts:
            for own, x in zip((los, his), part.bounds(queries, keys, device), strict=True):
                if x is not None and x.device not in (device, torch.device("cpu")):
                    raise ValueError(f"{part!r} is on {x.device}, but q is on {device}")
                own.extend([] if x is None else [x.to(device)])
        if not _do_broadcast([*los, *his]):
            shapes = ", ".join(shape_of(x) for x in (*los, *his))
            raise ValueError(f"attn_mask {self!r} must broadcast to (B, H, {queries}), got bounds of shapes {shapes}")
        return Bounds(_fold(torch.maximum, los), _fold(torch.minimum, his))

    def dense(self, queries: int, keys: int, *, device: torch.device | str | None = None) -> Tensor:
        """The mask as a bool tensor, True = visible: (queries, keys), or more dims that broadcast to (B, H, …)."""
        for name, size in (("queries", queries), ("keys", keys)):
            if not isinstance(size, (int, torch.SymInt)) or size < 0:
                raise ValueError(f"{name} of Mask.dense must be an int ≥ 0, got {size!r}")
        given = [x for part in self.parts for x in vars(part).values() if isinstance(x, Tensor)]
        device = torch.device(device) if device is not None else given[0].device if given else torch.device("cpu")
        lo, hi = self.bounds(queries, keys, device)
        every = torch.arange(queries, device=device)
        lo = torch.zeros_like(every) if lo is None else lo
        hi = torch.full_like(every, keys) if hi is None else hi
        lo, hi, _ = torch.broadcast_tensors(lo, hi, every)
        return interval(lo, hi, keys)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts)) or "Mask()"


def _fold(combine: Callable[[Tensor, Tensor], Tensor], given: list[Tensor]) -> Tensor | None:
    return functools.reduce(combine, given) if given else None


def _flag(x: bool, name: str) -> bool:
    if not isinstance(x, bool):  # Mask.causal(8) is no mask of 8 tokens
        raise TypeError(f"{name} must be a bool, got {type(x).__name__}")
    return x


def _do_broadcast(given: list[Tensor]) -> bool:
    sizes = itertools.zip_longest(*(reversed(x.shape) for x in given), fillvalue=1)
    return all(len({*own} - {1}) < 2 for own in sizes)


def _per_entry(x: Ints, name: str) -> Tensor:
    x = as_integers(x, name)
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (B,), one per batch entry, got {shape_of(x)}")
    return x
