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


def find_starts(position_ids: Tensor | None) -> Tensor | None:
    """Returns where packed documents begin, [B, N] bools, by positions that start anew; None if none do.

    In a batch the positions of left padding start anew too (0, 0, 0, 1 or 1, 1, 0, 1), but fall by 1 at most.

    >>> from regard.health.capture.documents import find_starts
    >>> find_starts(torch.tensor([[0, 1, 2, 0, 1]])).int()
    tensor([[1, 0, 0, 1, 0]], dtype=torch.int32)
    """
    if position_ids is None or position_ids.ndim != 2:
        return None
    change = position_ids.diff()
    if not bool((change <= 0 if len(position_ids) == 1 else change < -1).any()):
        return None
    return torch.nn.functional.pad(change <= 0, (1, 0), value=True)


def documents_of_positions(position_ids: Tensor | None) -> Tensor | None:
    """Returns cu_seqlens of one packed row, whose positions [1, N] start anew with each document; None if one.

    >>> from regard.health.capture.documents import documents_of_positions
    >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]]))
    tensor([0, 3, 5])
    """
    starts = find_starts(position_ids)
    if starts is None or len(starts) != 1:
        return None
    begin = starts[0].nonzero()[:, 0]
    return torch.cat([begin, begin.new_tensor([starts.shape[1]])])
