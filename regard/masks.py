"""Dense bool masks, True = visible. `regard.Mask` says the same without an N × N tensor.

>>> import regard
>>> regard.masks.causal(3)
tensor([[ True, False, False],
        [ True,  True, False],
        [ True,  True,  True]])
>>> regard.masks.padding([1, 3], max_len=3)
tensor([[ True, False, False],
        [ True,  True,  True]])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from regard._facts import readable

__all__ = ["causal", "padding"]

Device = torch.device | str | None


def causal(n: int, keys: int | None = None, *, device: Device = None) -> Tensor:
    """(n, keys): query i sees keys 0 … i, aligned at the top left as in torch.

    Returns:
        A bool mask, True where a key is visible.

    Raises:
        TypeError: `n` or `keys` is not an int.
        ValueError: `n` or `keys` is negative.
    """
    return window(n, keys, right=0, device=device)


def window(
    n: int,
    keys: int | None = None,
    left: int | None = None,
    right: int | None = None,
    *,
    first: int = 0,
    device: Device = None,
) -> Tensor:
    """(n, keys): query i sees keys i − left … i + right; None is no limit on that side. Queries count from `first`.

    Returns:
        A bool mask, True where a key is visible.

    Raises:
        TypeError: A number is not an int.
        ValueError: `n` or `keys` is negative.
    """
    keys = n if keys is None else keys
    n, keys, first = _count(n, "n"), _count(keys, "keys"), _whole(first, "first")
    left, right = (None if side is None else _whole(side, name) for side, name in ((left, "left"), (right, "right")))
    offset = torch.arange(keys, device=device) - torch.arange(first, first + n, device=device)[:, None]
    seen = torch.ones(n, keys, dtype=torch.bool, device=device)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    return seen


def padding(lengths: Tensor | Sequence[int], max_len: int | None = None) -> Tensor:
    """(B, max_len): the first lengths[b] positions of each row are visible.

    Returns:
        A bool mask, True where a position is visible.

    Raises:
        TypeError: `lengths` does not hold integers.
        ValueError: `lengths` has not one dimension, or a length lies outside 0 … max_len.
    """
    try:
        lengths = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)  # as_tensor may move it
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"lengths must be a sequence or a tensor of ints, got {lengths!r}") from None
    if lengths.numel() == 0:
        lengths = lengths.long()
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape (B,), got {tuple(lengths.shape)}")
    if max_len is None:
        max_len = int(lengths.max()) if lengths.numel() else 0
    max_len = _count(max_len, "max_len")
    if readable(lengths) and not bool(((lengths >= 0) & (lengths <= max_len)).all()):
        raise ValueError(f"lengths must lie in [0, max_len = {max_len}], got {lengths.tolist()[:8]}")
    return torch.arange(max_len, device=lengths.device) < lengths[:, None]


def _whole(n: int, name: str) -> int:
    try:
        return operator.index(n)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(n).__name__}") from None


def _count(n: int, name: str) -> int:
    count = _whole(n, name)
    if count < 0:
        raise ValueError(f"{name} must be ≥ 0, got {n!r}")
    return count


def dense(
    n: int,
    keys: int,
    *,
    is_causal: bool = False,
    window_: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    first: int = 0,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Causal order, window and key lengths as one bool mask, (n, keys) or (B, 1, n, keys); None if all is visible."""
    seen = None
    if is_causal or window_ is not None:
        left, right = window_ or (None, None)
        right = 0 if is_causal and (right is None or right > 0) else right
        seen = window(n, keys, left, right, first=first, device=device)
    if key_lengths is not None:
        lengths = padding(key_lengths.to(device).clamp(0, keys), keys)[:, None, None, :]
        seen = lengths if seen is None else seen & lengths
    return seen


def interval(lo: Tensor, hi: Tensor, keys: int) -> Tensor:
    """(…, Lq, keys): query i sees keys lo_i ≤ j < hi_i; lo and hi are (…, Lq).

    >>> interval(torch.tensor([0, 1]), torch.tensor([1, 3]), 3)
    tensor([[ True, False, False],
            [False,  True,  True]])
    """
    j = torch.arange(keys, device=lo.device)
    return (j >= lo[..., None]) & (j < hi[..., None])


def spread_relative(table: Tensor, queries: int, keys: int) -> Tensor:
    """(H, queries, keys): entry (i, j) is table[h, j − i + queries − 1], of a table (H, queries + keys − 1).

    >>> spread_relative(torch.arange(4.0)[None], 2, 3)
    tensor([[[1., 2., 3.],
             [0., 1., 2.]]])
    """
    i, j = torch.arange(queries, device=table.device)[:, None], torch.arange(keys, device=table.device)
    return table[:, j - i + queries - 1]


def blanked(visible: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """(…, N, D) each, 0 where no query of `visible` (…, M, N) sees a key: it cannot leak then, not even as NaN."""
    unseen = ~visible.any(-2)[..., None]
    return tuple(x.masked_fill(unseen, 0.0) for x in keys)


def resolve_causal_bias(mask, is_causal: bool, device=None, past: int = 0) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) where `mask` may be torch's CausalBias, which holds no numbers: what it stands for.

    Behind `past` cached keys is_causal is aligned at the bottom right: one at the top left of all keys is written out.

    >>> from torch.nn.attention.bias import causal_lower_right, causal_upper_left
    >>> resolve_causal_bias(causal_upper_left(2, 3), False), resolve_causal_bias(causal_lower_right(1, 2), False)
    ((None, True), (tensor([[True, True]]), False))
    """
    if type(mask).__name__ != "CausalBias":
        return mask, is_causal
    queries, keys = mask.seq_len_q, mask.seq_len_kv
    upper = mask.variant.name == "UPPER_LEFT"
    if queries == keys or (upper and not past):
        return None, True
    return window(queries, keys, right=0 if upper else keys - queries, device=device), is_causal
