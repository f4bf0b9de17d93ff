"""Documents packed into one sequence: which keys each query sees, as an interval of keys for each query.

cu_seqlens = [0, n₁, n₁ + n₂, …] are the ends of the documents, as flash-attention writes them. Query i of document d
stands at the position p_i = i − cu_q[d] + n_k − n_q among the document's keys: the last query at the last key. It
sees keys j of its own document with p_i − left ≤ j − cu_k[d] ≤ p_i + right; causal order is right = 0.
"""

import torch
from torch import Tensor

from regard._core.mask.parts import Intervals, Packed, find_longest, reach_of
from regard.mask import Mask


def document_mask(
    cu_q: Tensor, cu_k: Tensor, queries: int, keys: int, causal: bool = False,
    window: tuple[int | None, int | None] = (None, None), longest: object = None,
) -> Mask:  # fmt: skip
    """Returns the mask of packed documents; tokens past the last end see nothing.

    `Mask.documents` serves queries and keys of the same documents; this mask also serves caches, whose keys are more
    than the queries. `longest`, the tokens of the longest document, makes backward on a GPU faster if it is given.

    >>> from regard.health.capture.documents import document_mask
    >>> document_mask(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4]), 3, 4, causal=True).dense(3, 4).int()
    tensor([[1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    is_one = cu_q is cu_k
    cu_q, cu_k = cu_q.long(), cu_k.to(cu_q.device).long()
    reach = reach_of(find_longest(cu_k, longest), window[0], 0 if causal else window[1]) if is_one else (None, None)
    cu_q = torch.cat([cu_q, cu_q[-1:].clamp_min(queries)])  # tokens past the last end: a document without keys
    packed = Packed.of(cu_q, torch.cat([cu_k, cu_k[-1:]]), queries, causal, *window)
    return Mask((Intervals(packed.lo.clamp(0, keys), packed.hi.clamp(0, keys), reach),))


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
