"""The mask of packed documents, made here for every caller, and where documents begin.

cu_seqlens = [0, n₁, n₁ + n₂, …] are the ends of the documents, as flash-attention writes them. Query i of document d
stands at the position p_i = i − cu_q[d] + n_k − n_q among the document's keys: the last query at the last key. It
sees keys j of its own document with p_i − left ≤ j − cu_k[d] ≤ p_i + right; causal order is right = 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from regard._call.mask.mask import Mask
from regard._call.mask.parts import Intervals, Packed, check_cu_seqlens, find_longest, reach_of
from regard._facts import is_plain_eager, readable, remember

Ints = Tensor | Sequence[int]
Sides = tuple[int | None, int | None]
MOST = 4
_recent: dict[Hashable, tuple[list[weakref.ref], Mask]] = {}  # the layers of a model pass the same cu_seqlens in turn


def pack_documents(
    ends: tuple[Ints, ...], names: tuple[str, ...], queries: int, keys: int, device: torch.device, causal: bool,
    window: Sides = (None, None), longest: int | None = None,
) -> Mask:  # fmt: skip
    """The mask of documents that end at `ends`: one list, or one of queries and one of keys; checked, and kept.

    names: what the caller calls them. longest: no document has more keys, as the caller promises.
    """

    def make() -> Mask:
        cu_q = check_cu_seqlens(ends[0], names[0], queries)
        cu_k = check_cu_seqlens(ends[-1], names[0] if ends[-1] is ends[0] else names[-1], keys)
        if len(cu_q) != len(cu_k):
            raise ValueError(
                f"{names[0]} and {names[-1]} must have as many documents, got {len(cu_q) - 1} and {len(cu_k) - 1}"
            )
        where = cu_q.to(device)
        if ends[-1] is not ends[0]:
            return Mask((Packed.of(where, cu_k.to(device), queries, causal, *window),))
        return Mask((Packed.of(where, where, queries, causal, *window, find_longest(cu_k, longest)),))

    return recall(ends, (queries, keys, device, causal, *window, longest), make)


def document_mask(
    cu_q: Tensor, cu_k: Tensor, queries: int, keys: int, causal: bool = False, window: Sides = (None, None),
    longest: object = None,
) -> Mask:  # fmt: skip
    """The mask of packed documents as a model passes them, unchecked; tokens past the last end see nothing.

    >>> from regard._call.mask.documents import document_mask
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
    """Where packed documents begin, [B, N] bools, by positions that start anew; None if none do.

    In a batch the positions of left padding start anew too (0, 0, 0, 1 or 1, 1, 0, 1), but fall by 1 at most.

    >>> from regard._call.mask.documents import find_starts
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
    """The cu_seqlens of one packed row, whose positions [1, N] start anew with each document; None if one.

    >>> from regard._call.mask.documents import documents_of_positions
    >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]]))
    tensor([0, 3, 5])
    """
    starts = find_starts(position_ids)
    if starts is None or len(starts) != 1:
        return None
    begin = starts[0].nonzero()[:, 0]
    return torch.cat([begin, begin.new_tensor([starts.shape[1]])])


def recall(given: tuple[object, ...], options: tuple, make: Callable[[], Mask]) -> Mask:
    """Return make(), or what it returned lately for the same options and tensors.

    Tensors on the CPU are the same if their values are. Those on a GPU, whose values would take a wait, are if the
    object is and torch has seen no change in place; what writes to its memory past torch (`.data`, DLPack) is not
    noticed. Not while something records calls: the work of `make` belongs to the record then.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    on_gpu = [x for x in tensors if x.is_cuda]
    if len(tensors) < len(given) or not is_plain_eager() or any(x.is_inference() for x in on_gpu):
        return make()
    if not all(x.is_cuda or readable(x) for x in tensors) or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return make()
    key = options, *((id(x), x._version) if x.is_cuda else (x.dtype, str(x.tolist())) for x in tensors)
    found = _recent.get(key)
    if found is not None and all(known() is x for known, x in zip(found[0], on_gpu, strict=True)):
        return found[1]
    return remember(_recent, key, ([weakref.ref(x) for x in on_gpu], make()), MOST)[1]
