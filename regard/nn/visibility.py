"""`Visibility`: causal order, window, masks and a cache of a module's call as arguments of `regard.attention`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard._core.validation import check_window


class Visibility(NamedTuple):
    """Keyword arguments of `regard.attention`, and the first key that any query sees."""

    options: dict
    first: int = 0

    @classmethod
    def with_cache(
        cls,
        keys: int,
        past: int,
        is_causal: bool,
        window: tuple[int | None, int | None] | None,
        attn_mask: Tensor | None,
        key_lengths: Tensor | None,
    ) -> Visibility:
        """Return the visibility of queries at positions past, past + 1, … among `keys` keys.

        Query i sees keys past + i − left … past + i + right. Keys before f = max(0, past − left) are cut off; counted
        from f the rest is a window again. Causal order is the window (None, 0), which can be combined with a mask.

        >>> from regard.nn.visibility import Visibility
        >>> visibility = Visibility.with_cache(12, 10, True, (3, None), None, None)
        >>> visibility.first, visibility.options["window"]
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

    def trim(self, x: Tensor) -> Tensor:
        """Drop the keys that no query sees from x [B, G, N, D]."""
        return x[:, :, self.first :]
