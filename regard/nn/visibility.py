"""`Visibility`: causal order, window, masks and a cache of a module's call as arguments of `regard.attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._call.arguments import AttnMask, Window
from regard._call.mask.attn_mask import GivenMask, densify, split_attn_mask
from regard._call.mask.mask import Mask
from regard._call.mask.visible import check_key_lengths, check_mask, check_window


class Visibility(NamedTuple):
    """Keyword arguments of `regard.attention`, and the first key that any query sees."""

    options: dict
    first: int = 0

    @classmethod
    def with_cache(
        cls, keys: int, past: int, is_causal: bool, window: Window, attn_mask: Tensor | None, key_lengths: Tensor | None
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

    @classmethod
    def with_mask(
        cls, given: GivenMask, sizes: tuple[int, int, int], window: Window, key_lengths: Tensor | None
    ) -> Visibility:
        """Return the visibility of a `regard.Mask` or bias; sizes are (queries, keys, cached keys).

        Behind a cache causal order and window join the mask, aligned at the bottom right; no key is cut off.
        """
        queries, keys, past = sizes
        left, right = check_window(window)
        if past and keys - queries != past:
            raise ValueError(
                f"attn_mask: a regard.Mask or bias beside a cache needs as many new keys as queries, got {keys - past} "
                f"and {queries}"
            )
        mask = Mask() if given.mask is None else given.mask
        if given.is_causal:
            mask &= Mask.causal(bottom_right=past > 0)
        if (left, right) != (None, None):
            mask &= Mask.window(left, right, bottom_right=past > 0)
        hidden = [x for x in given.tensors if x.dtype == torch.bool]
        biases = [*(x for x in given.tensors if x.dtype != torch.bool), given.bias]
        attn_mask = (*hidden, mask, *biases)
        return cls(dict(attn_mask=attn_mask, is_causal=False, key_lengths=key_lengths, window=None))

    @classmethod
    def of_call(
        cls, q: Tensor, keys: int, past: int, attn_mask: AttnMask, is_causal: bool, window: Window, key_lengths: Any
    ) -> Visibility:
        """Return the visibility of q [B, H, M, D] among `keys` keys, of which `past` were cached."""
        batch, heads, queries = q.shape[:3]
        key_lengths = check_key_lengths(key_lengths, batch, keys, q)
        given = split_attn_mask(attn_mask, is_causal, q.device, past)
        tensors = [check_mask(x, (batch, heads), batch, heads, queries, keys, q) for x in given.tensors]
        if given.mask is None and given.bias is None and len(tensors) < 2:
            dense = tensors[0] if tensors else None
            return cls.with_cache(keys, past, given.is_causal, window, dense, key_lengths)
        return cls.with_mask(given._replace(tensors=tuple(tensors)), (queries, keys, past), window, key_lengths)

    def densify(self, q: Tensor, keys: int) -> Visibility:
        """Return the same with a tensor in the place of a `regard.Mask` or bias."""
        dense = densify(self.options["attn_mask"], q, keys)
        return self._replace(options={**self.options, "attn_mask": dense})

    def trim(self, x: Tensor) -> Tensor:
        """Drop the keys that no query sees from x [B, G, N, D]."""
        return x[:, :, self.first :]
