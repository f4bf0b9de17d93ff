"""Checks dense masks, windows and key lengths, and joins them with a `regard.Mask`: an interval per query at most."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard._call.mask.attn_mask import GivenMask, find_positions
from regard._call.mask.mask import Mask
from regard._call.mask.parts import (
    INTEGERS,
    Intervals,
    Lengths,
    Packed,
    Padding,
    Part,
    Window,
    check_side,
    least,
)
from regard._call.validation import check_dense, fits, is_float
from regard._facts import readable


@dataclass
class Visible:
    """Keys that are visible: causal order, window and lengths, and an interval for what these do not say."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    lengths: tuple[Tensor, ...] = ()  # [B] each
    interval: Tensor | None = None  # [3, B or 1, H or 1, M]: lo, hi, position

    def with_window(self, left: int | None, right: int | None, keys: int) -> Visible:
        """Narrow the window; a side that reaches every key is none."""
        right = None if right is not None and right >= keys - 1 else right
        return replace(self, left=least(self.left, left), right=least(self.right, right))


def resolve_mask(
    mask: Mask, beside: Visible, q: Tensor, queries: int, keys: int, counts_distance: bool
) -> tuple[Visible, Tensor | None]:
    """Join a mask and what is given `beside` it, of q [B, H, …], to (what is visible, key_lengths [B] or None).

    What needs no tensor goes into causal order, window and lengths, the rest into an interval.

    counts_distance: queries that are aligned at the bottom right need an interval for their position.
    """
    batch, heads, device = *q.shape[:2], q.device
    found, rest = replace(beside), []
    for part in mask.parts:
        folded = _fold_part(found, part, queries, keys)
        if folded is None:
            rest.append(part)
        else:
            found = folded
    for part in () if torch.compiler.is_compiling() else rest:  # the compiler would guard on every length
        left, right = getattr(part, "reach", (None, None))
        found = found.with_window(_round_up(left, keys), _round_up(right, keys), keys)
    position = find_positions(mask, queries, keys, device)
    if rest or (position is not None and counts_distance):
        found.interval = make_interval(Mask(tuple(rest)), position, queries, keys, device)
        shape = tuple(found.interval.shape[1:])
        if not fits(shape, (batch, heads, queries)):
            raise ValueError(
                f"attn_mask {mask!r} must broadcast to (B, H, Lq) = {(batch, heads, queries)}, got {shape}"
            )
    own = found.lengths[len(beside.lengths) :]
    checked = (check_key_lengths(x, batch, keys, q, "lengths of Mask") for x in own)
    lengths = [x for x in (*beside.lengths, *checked) if x is not None]
    return found, functools.reduce(torch.minimum, lengths) if lengths else None


def _fold_part(found: Visible, part: Part, queries: int, keys: int) -> Visible | None:
    """Return what is visible with a part folded in, None for one that only an interval per query can say.

    `bottom_right` is the order behind a KV cache: its offset, keys − queries, enters here, and for the modules of
    `regard.nn` in `nn/visibility.py`.
    """
    offset = keys - queries if getattr(part, "bottom_right", False) else 0
    if isinstance(part, Window):
        left = None if part.left is None else part.left - offset
        right = None if part.right is None else part.right + offset
        if (left, right) == (None, 0):
            return replace(found, causal=True)
        is_around = (left is None or left >= 0) and (right is None or right >= 0)
        return found.with_window(left, right, keys) if is_around else None
    if isinstance(part, Lengths):
        return replace(found, lengths=(*found.lengths, part.lengths))
    if isinstance(part, Padding) and part.is_right and part.keys == keys:
        return replace(found, lengths=(*found.lengths, part.hi))
    return None


def _round_up(side: int | None, keys: int) -> int | None:
    """Return a side rounded up to one of a few sizes, because calls of each size are recorded by themselves."""
    if not side:
        return side
    step = max(128, (1 << side.bit_length()) // 8)
    side = -(-side // step) * step
    return side if side < keys - 1 else None


def find_ahead(mask: Mask | None, ahead: int | None, queries: int, keys: int) -> int | None:
    """Return how far beyond its own index a query may see, with `ahead` given beside the mask; None: no limit."""
    for part in () if mask is None else mask.parts:
        if isinstance(part, Window) and part.right is not None:
            ahead = least(ahead, part.right + (keys - queries if part.bottom_right else 0))
    return ahead


def check_order(given: GivenMask, ahead: int | None, queries: int, keys: int) -> None:
    """Raise if a bias needs causal order and the call has none; dense masks and listed intervals are not looked at."""
    if given.bias is None or not given.bias.needs_causal_order:
        return
    parts = () if given.mask is None else given.mask.parts
    if given.tensors or any(isinstance(part, (Intervals, Packed)) for part in parts):
        return
    if queries > 1 and (ahead is None or ahead > keys - queries):
        raise ValueError(
            "attn_mask: bias.forgetting needs causal order; pass is_causal=True, or (Mask.causal(), bias) as attn_mask"
        )


def make_interval(mask: Mask, position: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return [3, B or 1, H or 1, M] int32: lo, hi and position of each query."""
    lo, hi = mask.bounds(queries, keys, device)
    i = torch.arange(queries, device=device)
    lo = torch.zeros_like(i) if lo is None else lo.clamp(0, keys)
    hi = torch.full_like(i, keys) if hi is None else hi.clamp(0, keys)
    lo, hi, i = torch.broadcast_tensors(lo, hi, i.expand(1, 1, queries))
    return torch.stack([lo, hi, i if position is None else position.expand(i.shape)]).int()


def check_mask(mask, lead, batch: int, heads: int, queries: int, keys: int, q: Tensor) -> Tensor:
    """Return the mask with 4 dims that broadcast to [B, H, M, N], expanded no more than needed."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    check_dense(mask, "attn_mask")
    if mask.dtype != torch.bool and not is_float(mask):
        raise TypeError(f"attn_mask must be bool (True = visible) or float16 or wider (added), got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {mask.device}")
    full = (*lead, queries, keys)
    if not fits(mask.shape, full):
        raise ValueError(f"attn_mask must broadcast to {full}, got {tuple(mask.shape)}")
    may_shrink = _may_undo_expand(mask)
    while mask.ndim < len(full):
        mask = mask[None]
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded by the caller: one copy is enough, and its gradient the sum
            mask = mask.narrow(dim, 0, 1) if may_shrink else mask.contiguous()
    inner = mask.shape[-2:]
    outer = mask.shape[:-2]
    if len(lead) == 2:
        return mask
    if len(lead) < 2:
        mask = mask.reshape(*(1,) * (2 - len(lead)), *outer, *inner)
        return mask.transpose(0, 1) if len(lead) == 1 and heads == 1 and batch != 1 else mask
    if all(size == 1 for size in outer[:-1]):
        return mask.reshape(1, outer[-1], *inner)
    return mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(batch, outer[-1], *inner)


def _may_undo_expand(mask: Tensor) -> bool:
    """True if one entry may stand for all its expanded copies: not if each copy has a gradient of its own."""
    if not mask.requires_grad:
        return True
    if torch.compiler.is_compiling() or mask.is_leaf or mask.retains_grad:
        return False
    return mask.grad_fn is not None and mask.grad_fn.name().startswith("Expand")


def check_window(window) -> tuple[int | None, int | None]:
    """Return (left, right), each None or a number of keys."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), each a number of keys or None, got {window!r}")
    left, right = window
    return check_side(left, "window's left side"), check_side(right, "window's right side")


def check_key_lengths(key_lengths, batch: int, keys: int, q: Tensor, name: str = "key_lengths") -> Tensor | None:
    """Return key_lengths as int32 [B] on q's device."""
    if key_lengths is None:
        return None
    if not isinstance(key_lengths, Tensor):
        try:
            key_lengths = torch.tensor([operator.index(n) for n in key_lengths], dtype=torch.int64, device="cpu")
        except TypeError:
            raise TypeError(f"{name} must be ints, one per batch entry, got {key_lengths!r}") from None
        except (ValueError, RuntimeError):  # beyond int64
            raise ValueError(f"{name} must lie in [0, {keys}], got {key_lengths!r}") from None
    check_dense(key_lengths, name)
    if key_lengths.dtype not in INTEGERS:
        raise TypeError(f"{name} must be integers, got {key_lengths.dtype}")
    if key_lengths.ndim != 1 or key_lengths.shape[0] != batch:
        raise ValueError(f"{name} must have shape ({batch},), one per batch entry, got {tuple(key_lengths.shape)}")
    if readable(key_lengths):
        if key_lengths.numel() and not bool(((key_lengths >= 0) & (key_lengths.long() <= keys)).all()):
            raise ValueError(f"{name} must lie in [0, {keys}], got {key_lengths.tolist()[:8]}")
    return key_lengths.to(q.device, torch.int32)
