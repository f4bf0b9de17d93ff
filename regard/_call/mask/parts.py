"""The parts that a `regard.Mask` is made of: each gives the interval of keys that every query sees.

`bounds(queries, keys, device)` returns (lo, hi), each None (no limit) or ints that broadcast to (B, H, queries).
`reach`, where a part has one, is a window that holds them all, in plain ints: kernels size scratch and are chosen by
it, as the bounds themselves may be known to a GPU alone.

A new part is a class here, in the union `Part`, and a method of `regard.Mask` that makes it (`mask.py`). Kernels
then read it as an interval per query (on a GPU `visibility.py`, on Hopper `hopper/spans.py`). One that is a causal
order, window or length for every query folds into those in `visible.py`, which is faster.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard._facts import has_no_values

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNLIMITED = 1 << 31  # keys to one side: more than there are


Reach = tuple[int | None, int | None]  # query i sees keys from i − left to i + right; None is no limit


class Bounds(NamedTuple):
    """Query i sees keys lo_i ≤ j < hi_i; None is no limit."""

    lo: Tensor | None = None
    hi: Tensor | None = None


@dataclass(frozen=True)
class Window:
    """Query i sees keys i − left … i + right, or with `bottom_right` from i + keys − queries; (None, 0) is causal."""

    left: int | None
    right: int | None
    bottom_right: bool

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        i = _rows(queries, keys, self.bottom_right, device)
        lo = None if self.left is None else i - self.left
        return Bounds(lo, None if self.right is None else i + self.right + 1)

    def __repr__(self) -> str:
        end = "bottom_right=True" if self.bottom_right else ""
        if (self.left, self.right) == (None, 0):
            return f"Mask.causal({end})"
        return f"Mask.window({self.left}, {self.right}{end and ', '}{end})"


@dataclass(frozen=True)
class Chunks:
    """Query i sees the keys of its own chunk of `size`."""

    size: int

    @property
    def reach(self) -> Reach:
        return self.size - 1, self.size - 1

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        lo = torch.arange(queries, device=device) // self.size * self.size
        return Bounds(lo, lo + self.size)

    def __repr__(self) -> str:
        return f"Mask.chunks({self.size})"


@dataclass(frozen=True, eq=False)
class Lengths:
    """Batch entry b shows its first lengths[b] keys."""

    lengths: Tensor  # [B]

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        return Bounds(hi=check_range(self.lengths, "Mask.lengths", keys)[:, None, None])

    def __repr__(self) -> str:
        return f"Mask.lengths({shape_of(self.lengths)})"


@dataclass(frozen=True, eq=False)
class Padding:
    """Batch entry b shows the keys lo[b] ≤ j < hi[b] of `keys`."""

    lo: Tensor  # [B]
    hi: Tensor
    keys: int
    is_right: bool  # True if every lo is known to be 0

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        if keys != self.keys:
            raise ValueError(f"Mask.padding is of {self.keys} keys, but k has {keys}")
        return Bounds(self.lo[:, None, None], self.hi[:, None, None])

    def __repr__(self) -> str:
        return f"Mask.padding(({len(self.lo)}, {self.keys}))"


@dataclass(frozen=True, eq=False)
class Documents:
    """Query i sees the keys of its own document: lo and hi [N] or [B, N]."""

    lo: Tensor
    hi: Tensor
    reach: Reach

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        _check_tokens(self.lo.shape[-1], queries, keys)
        lo, hi = (x if x.ndim == 1 else x[:, None] for x in (self.lo, self.hi))
        return Bounds(lo, hi)

    def __repr__(self) -> str:
        return f"Mask.documents(ids={shape_of(self.lo)})"


@dataclass(frozen=True, eq=False)
class Cumulative:
    """Query i sees the keys of its own document, which begin and end at cu_seqlens."""

    cu_seqlens: Tensor  # [documents + 1]
    tokens: int | None  # None where values cannot be read, as in torch.compile
    reach: Reach

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        _check_tokens(keys if self.tokens is None else self.tokens, queries, keys)
        document = document_of(self.cu_seqlens, keys)
        return Bounds(self.cu_seqlens[document], self.cu_seqlens[document + 1])

    def __repr__(self) -> str:
        return f"Mask.documents(cu_seqlens={shape_of(self.cu_seqlens)})"


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first lengths[b] keys are visible to all queries; the rest is causal."""

    lengths: Tensor  # [B] or []
    bottom_right: bool

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        lengths = check_range(self.lengths, "Mask.prefix", keys)
        rows = _rows(queries, keys, self.bottom_right, lengths.device) + 1
        return Bounds(hi=torch.maximum(lengths[:, None, None] if lengths.ndim else lengths, rows))

    def __repr__(self) -> str:
        own = shape_of(self.lengths) if self.lengths.ndim else f"{int(self.lengths)}"
        return f"Mask.prefix({own}{', bottom_right=True' if self.bottom_right else ''})"


@dataclass(frozen=True, eq=False)
class Intervals:
    """Query i sees keys lo_i ≤ j < hi_i; both broadcast to (B, H, queries)."""

    lo: Tensor
    hi: Tensor
    reach: Reach = (None, None)

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        for name, x in (("lo", self.lo), ("hi", self.hi)):
            if x.ndim and x.shape[-1] not in (1, queries):
                raise ValueError(
                    f"{name} of Mask.intervals must broadcast to (B, H, {queries}), one for each query, got "
                    f"{shape_of(x)}"
                )
            check_range(x, f"{name} of Mask.intervals", keys)
        return Bounds(self.lo, self.hi)

    def __repr__(self) -> str:
        return f"Mask.intervals({shape_of(self.lo)}, {shape_of(self.hi)})"


@dataclass(frozen=True, eq=False)
class Packed:
    """Query i of packed documents sees keys lo_i ≤ j < hi_i; distances count from position_i; [queries] each."""

    lo: Tensor
    hi: Tensor
    position: Tensor
    reach: Reach

    @classmethod
    def of(
        cls, cu_q: Tensor, cu_k: Tensor, queries: int, causal: bool, left: int | None, right: int | None,
        longest: int | None = None,
    ) -> Packed:  # fmt: skip
        """Documents whose queries and keys lie at cu_q and cu_k; causal order and window align at the bottom right.

        longest: no document has more tokens; None: not known.
        """
        document, i = document_of(cu_q, queries), torch.arange(queries, device=cu_q.device)
        lo, hi = cu_k[document], cu_k[document + 1]
        position = lo + i - cu_q[document]
        right = 0 if causal and (right is None or right > 0) else right
        reach = reach_of(longest, left, right) if cu_q is cu_k else (None, None)
        if left is None and right is None:
            return cls(lo, hi, position, reach)
        position = position + (hi - lo) - (cu_q[document + 1] - cu_q[document])
        lo = lo if left is None else torch.maximum(lo, position - left)
        hi = hi if right is None else torch.minimum(hi, position + right + 1)
        return cls(lo, hi, position, reach)

    def bounds(self, queries: int, keys: int, device: torch.device | None) -> Bounds:
        return Bounds(self.lo, self.hi)

    def __repr__(self) -> str:
        return f"cu_seqlens of {len(self.lo)} queries"


Part = Window | Chunks | Lengths | Padding | Documents | Cumulative | Prefix | Intervals | Packed
SHARED = (Window, Chunks, Packed)  # parts that are the same for every batch entry
PLANNED = (*SHARED, Documents, Cumulative)  # parts with which calls keep a plan: they become an interval or a window


def _rows(queries: int, keys: int, bottom_right: bool, device: torch.device | None) -> Tensor:
    """The positions of the queries among the keys."""
    return torch.arange(queries, device=device) + (keys - queries if bottom_right else 0)


def _check_tokens(tokens: int, queries: int, keys: int) -> None:
    if not queries == keys == tokens:
        raise ValueError(
            f"Mask.documents is of {tokens} tokens, but q has {queries} and k has {keys}; it must cover them all. "
            "Queries and keys that are packed differently go to regard.attention_varlen"
        )


def check_range(x: Tensor, name: str, keys: int) -> Tensor:
    """Return x; raise unless its values, where they can be read without a wait, lie in [0, keys]."""
    if x.device.type == "cpu" and not has_no_values(x) and x.numel() and not (x.min() >= 0 and x.max() <= keys):
        raise ValueError(f"{name} must lie in [0, {keys}], the keys of k, got {x.flatten().tolist()[:8]}")
    return x


def as_integers(x: Tensor | Sequence[int] | int, name: str) -> Tensor:
    """Return a copy as an int64 tensor; raise a TypeError that names the argument if it holds anything else."""
    try:
        x = x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be ints or a tensor of them, got {x!r}") from None
    if x.numel() and (x.dtype not in INTEGERS or x.layout != torch.strided):
        came = x.dtype if x.layout == torch.strided else x.layout
        raise TypeError(f"{name} must be ints or a dense tensor of them, got {came}")
    return x.to(torch.int64, copy=True)  # uint8 does not hold the sums and limits that it meets


def check_side(side: int | None, name: str) -> int | None:
    """Return one side of a window, a number of keys; None, no limit, also in the place of UNLIMITED or more."""
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, numbers.Integral) or side < 0:
        raise ValueError(f"{name} must be an int ≥ 0, or None for no limit, got {side!r}")
    return int(side) if side < UNLIMITED else None  # i + sys.maxsize overflows


def check_cu_seqlens(cu_seqlens: Tensor | Sequence[int], name: str, tokens: int | None = None) -> Tensor:
    """Return cumulative lengths 0 = c₀ ≤ c₁ ≤ … ≤ c_D (= tokens) as an int64 tensor (D + 1,).

    With `tokens` values on a GPU are not looked at, because that would wait for it.
    """
    cu = as_integers(cu_seqlens, name)
    if cu.ndim != 1 or not cu.numel():
        raise ValueError(f"{name} must have shape (documents + 1,), got {shape_of(cu)}")
    if has_no_values(cu) or (tokens is not None and cu.device.type != "cpu"):
        return cu
    ends = cu.tolist()
    if ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"{name} must begin with 0 and never fall, got {ends[:8]}{'…' if len(ends) > 8 else ''}")
    if tokens is not None and ends[-1] != tokens:
        raise ValueError(f"{name} must end at the number of tokens, {tokens}, got {ends[-1]}")
    return cu


def least(a: int | None, b: int | None) -> int | None:
    """Return the smaller of two limits; None is no limit."""
    return b if a is None else a if b is None else min(a, b)


def reach_of(longest: int | None, left: int | None = None, right: int | None = None) -> Reach:
    """Return how far a query sees within a window if no document has more than `longest` tokens."""
    furthest = None if longest is None else max(longest - 1, 0)
    return least(left, furthest), least(right, furthest)


def find_longest(cu_seqlens: Tensor, promised: object = None) -> int | None:
    """Return the length of the longest document; on a GPU, where its values would take a wait, what is `promised`.

    A promise that is too small raises ValueError, and on a GPU a CUDA error.
    """
    if has_no_values(cu_seqlens) or len(cu_seqlens) < 2:
        return None
    if cu_seqlens.device.type == "cpu":
        longest = int(cu_seqlens.diff().max())
        if isinstance(promised, int) and promised < longest:
            raise ValueError(f"a document has {longest} tokens, more than the maximum that was given, {promised}")
        return longest
    if not isinstance(promised, int) or not cu_seqlens.is_cuda:
        return None
    is_kept = (cu_seqlens.diff() <= promised).all()
    torch._assert_async(is_kept, f"a document has more tokens than the maximum that was given, {promised}")
    return promised


def document_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's document, [tokens]; documents of length 0 have none."""
    positions = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, positions, right=True) - 1


def runs(ids: Tensor) -> tuple[Tensor, Tensor, Reach]:
    """Return (start, end) [..., N] of the run of equal ids that each token belongs to, and how far runs reach.

    Raises where an id comes back.
    """
    n = ids.shape[-1]
    positions = torch.arange(n, device=ids.device).expand(ids.shape)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    start = torch.where(is_first, positions, 0).cummax(-1).values
    is_last = torch.ones_like(is_first)
    is_last[..., :-1] = is_first[..., 1:]
    end = torch.where(is_last, positions + 1, n).flip(-1).cummin(-1).values.flip(-1)
    if not has_no_values(ids) and n:
        ranked = ids.sort(-1).values
        kinds = 1 + (ranked[..., 1:] != ranked[..., :-1]).sum(-1)
        comes_back, longest = torch.stack([(is_first.sum(-1) != kinds).any().long(), (end - start).max()]).tolist()
        if comes_back:
            raise ValueError(
                "ids of Mask.documents must keep each document's tokens side by side: here an id comes back after "
                "another; as a dense mask: attn_mask=ids[:, None, :, None] == ids[:, None, None, :]"
            )
        return start, end, reach_of(longest)
    return start, end, (None, None)


def shape_of(x: Tensor) -> str:
    """Return the shape of a tensor in words for messages."""
    return str(tuple(x.shape))
