"""Documents packed into one sequence: which keys each query sees, as a dense mask.

cu_seqlens = [0, n₁, n₁ + n₂, …] are the ends of the documents, as flash-attention writes them. Query i of document d
stands at the position p_i = i − cu_q[d] + n_k − n_q among the document's keys: the last query at the last key. It
sees keys j of its own document with p_i − left ≤ j − cu_k[d] ≤ p_i + right; causal order is right = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(
    cu_q: Tensor, cu_k: Tensor, queries: int, keys: int, causal: bool = False,
    window: tuple[int | None, int | None] = (None, None), key_lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the bool mask [1, 1, M, N] of packed documents, True = visible; tokens past the last end see nothing.

    `key_lengths` says how many keys of each document are in use; None for all.

    >>> from regard.health.capture.documents import document_mask
    >>> document_mask(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4]), 3, 4, causal=True)[0, 0].int()
    tensor([[1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    cu_q, cu_k = cu_q.long(), cu_k.to(cu_q.device).long()
    used = cu_k.diff() if key_lengths is None else key_lengths.to(cu_q.device).long()
    doc_q, place_q = _places(cu_q, queries)
    doc_k, place_k = _places(cu_k, keys)
    inside = (doc_q[:, None] == doc_k) & (doc_q < len(cu_q) - 1)[:, None]
    last = len(used) - 1
    inside &= place_k < used[doc_k.clamp(max=last)]
    place_q = place_q + (used - cu_q.diff())[doc_q.clamp(max=last)]
    left, right = window
    right = 0 if causal and right is None else min(right, 0) if causal and right is not None else right
    ahead = place_k - place_q[:, None]
    if right is not None:
        inside &= ahead <= right
    if left is not None:
        inside &= ahead >= -left
    return inside[None, None]


def _places(cu: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the document of each token and its place in that document."""
    token = torch.arange(tokens, device=cu.device)
    document = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    return document, token - cu[document]


def documents_of_positions(position_ids: Tensor | None) -> Tensor | None:
    """Returns cu_seqlens of one packed sequence, whose positions [1, M] start anew with each document; None if one.

    >>> from regard.health.capture.documents import documents_of_positions
    >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]]))
    tensor([0, 3, 5])
    """
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[0] != 1 or position_ids.shape[1] < 2:
        return None
    starts = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
    if not len(starts):
        return None
    ends = starts.new_tensor([0]), starts, starts.new_tensor([position_ids.shape[1]])
    return torch.cat(ends)
