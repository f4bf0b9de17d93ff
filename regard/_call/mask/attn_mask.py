"""Takes `attn_mask=` apart: a dense tensor, a `regard.Mask`, a bias of `regard.bias`, or a pair of them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._call.mask.mask import Mask
from regard._call.mask.parts import Documents, Lengths, Packed, Padding, Prefix
from regard.bias import Bias
from regard.masks import resolve_causal_bias


class GivenMask(NamedTuple):
    """The parts of an `attn_mask` argument; `tensors` are dense, bool or float."""

    tensors: tuple[Tensor, ...] = ()
    mask: Mask | None = None
    bias: Bias | None = None
    is_causal: bool = False

    @property
    def counts_entries(self) -> bool:
        """True if the mask has a number for each batch entry."""
        parts = () if self.mask is None else self.mask.parts
        return any(
            isinstance(part, (Lengths, Padding))
            or (isinstance(part, Prefix) and part.lengths.ndim == 1)
            or (isinstance(part, Documents) and part.lo.ndim == 2)
            for part in parts
        )


def split_attn_mask(attn_mask: Any, is_causal: bool, device: torch.device | None, past: int = 0) -> GivenMask:
    """Take `attn_mask` apart; torch's CausalBias and BlockMask become what they stand for."""
    found = GivenMask(is_causal=is_causal)
    if isinstance(attn_mask, (tuple, list)) and not attn_mask:
        raise TypeError("attn_mask must be a tensor, a regard.Mask, a bias or a pair (mask, bias), got an empty one")
    for x in attn_mask if isinstance(attn_mask, (tuple, list)) else (attn_mask,):
        x, causal = resolve_causal_bias(x, found.is_causal, device, past)
        found = found._replace(is_causal=causal)
        if x is None:
            continue
        if isinstance(x, Mask):
            found = found._replace(mask=x if found.mask is None else found.mask & x)
        elif isinstance(x, Bias):
            if found.bias is not None:
                raise TypeError("attn_mask takes one bias of regard.bias, got two")
            found = found._replace(bias=x)
        elif type(x).__name__ == "BlockMask":
            found = found._replace(tensors=(*found.tensors, densify_block_mask(x, device)))
        elif isinstance(x, Tensor):
            found = found._replace(tensors=(*found.tensors, x))
        else:
            raise TypeError(
                f"attn_mask must be a tensor, a regard.Mask, a bias of regard.bias or a pair (mask, bias), got "
                f"{type(x).__name__}"
            )
    if sum(x.dtype != torch.bool for x in found.tensors) > 1:
        raise TypeError("attn_mask takes one float tensor, which is added to the scores, got two; pass their sum")
    return found


def densify(attn_mask: Any, q: Tensor, keys: int) -> Tensor | None:
    """Return all of `attn_mask` as one tensor that broadcasts to [B, H, M, N]; None if it hides and adds nothing."""
    given = split_attn_mask(attn_mask, False, q.device)
    hidden = [x for x in given.tensors if x.dtype == torch.bool]
    hidden += [given.mask.dense(q.shape[2], keys, device=q.device)] if given.mask is not None else []
    added = [x for x in given.tensors if x.dtype != torch.bool]
    added += [given.bias.dense(q, keys)] if given.bias is not None else []
    mask = functools.reduce(torch.logical_and, hidden) if hidden else None
    bias = functools.reduce(torch.add, added) if added else None
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, -math.inf)


def densify_block_mask(block_mask: Any, device: torch.device | None) -> Tensor:
    """Return FlexAttention's BlockMask as a bool tensor [B, H, M, N]: its full blocks, and mask_mod in partial ones."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, queries, keys = block_mask.shape
    visible = create_mask(block_mask.mask_mod, batch, heads, queries, keys, device)  # type: ignore[arg-type]

    def spread(counts: Tensor, indices: Tensor) -> Tensor:  # the first counts of indices, [B, H, rows, columns]
        columns = indices.shape[-1]
        listed = torch.where(torch.arange(columns, device=counts.device) < counts[..., None], indices, columns)
        blocks = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
        blocks = blocks.scatter(-1, listed.long(), True)[..., :columns]
        for dim, size in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
            blocks = blocks.repeat_interleave(size, dim)
        return blocks[..., :queries, :keys].to(visible.device)

    visible = visible & spread(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is not None:
        visible = visible | spread(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return visible


def find_positions(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return the positions [M] among the keys that distances count from; None: the queries' own indices."""
    for part in mask.parts:
        if isinstance(part, Packed):
            return part.position.to(device)
    if queries != keys and any(getattr(part, "bottom_right", False) for part in mask.parts):
        return torch.arange(queries, device=device) + (keys - queries)
    return None
