"""Dense masks that callers and the reference make of causal order, windows, lengths and intervals."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.masks import padding, window


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
