"""Who sees whom in a module's call: causal order, window, masks and a cache, in the terms of `regard.attention`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard._core.validation import check_window


class Order(NamedTuple):
    """Keyword arguments of `regard.attention`, and the first key that any query can reach."""

    options: dict
    first: int = 0

    @classmethod
    def of(cls, keys, past, is_causal, window, attn_mask, key_lengths) -> Order:
        """Query i stands at position past + i: it sees keys past + i − left … past + i + right.

        Counted from a first key f that is i + (past − f) − left …, so keys before past − left are cut off, and
        what is left is a window again. Causal order is the window (None, 0), which goes together with a mask.

        >>> from regard.nn.order import Order
        >>> order = Order.of(12, 10, True, (3, None), None, None)
        >>> order.first, order.options["window"]
        (7, (0, 3))
        """
        left, right = check_window(window)
        first = 0
        if past or (is_causal and attn_mask is not None):
            right = 0 if is_causal else right
            if left is not None:
                first = max(0, past - left)
                left -= past - first
            right = None if right is None else right + past - first
            window, is_causal = None if left is None and right is None else (left, right), False
        if first:
            if attn_mask is not None and attn_mask.shape[-1] == keys:
                attn_mask = attn_mask[..., first:]
            if key_lengths is not None:
                key_lengths = (key_lengths - first).clamp_min(0)
        return cls(dict(attn_mask=attn_mask, is_causal=is_causal, key_lengths=key_lengths, window=window), first)

    def keys(self, x: Tensor) -> Tensor:
        """[B, G, N, D] without the keys that no query reaches."""
        return x[:, :, self.first :]
