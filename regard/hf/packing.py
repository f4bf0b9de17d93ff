"""Documents packed into one row, as transformers passes them: by `cu_seq_lens_*`, or positions that start anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard._call.mask.documents import document_mask, find_starts, recall
from regard._call.mask.mask import Mask
from regard._call.mask.parts import check_cu_seqlens


def mask_of_documents(
    module: nn.Module, kwargs: dict, batch: int, queries: int, keys: int, causal: bool
) -> Mask | None:
    """Returns the mask of packed documents, by `cu_seq_lens_*` or by positions that start anew; None without any."""
    cu_q, cu_k, window = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "sliding_window"))
    limits = window - 1 if window and causal else None, None
    if cu_q is None and cu_k is None:
        documents = _find_documents(module, kwargs.get("position_ids"), batch) if causal and queries == keys else None
        return None if documents is None else documents & Mask.causal() & Mask.window(*limits)
    if cu_q is None or cu_k is None or batch != 1:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must both be given, for one row of packed documents (a batch of {batch} "
            "here); several rows are told apart by position_ids that start anew"
        )
    is_one, longest = cu_q is cu_k, kwargs.get("max_length_k")
    cu_q = _check_ends(cu_q, "cu_seq_lens_q", queries)
    cu_k = cu_q if is_one else _check_ends(cu_k, "cu_seq_lens_k", keys)
    options = queries, keys, causal, limits, longest if type(longest) is int else None
    return recall((cu_q, cu_k), options, lambda: document_mask(cu_q, cu_k, *options))


def _check_ends(cu: Any, name: str, tokens: int) -> Tensor:
    """Returns cu_seqlens; raises where their values can be read without a wait and are wrong. Padding may follow."""
    if isinstance(cu, Tensor) and (cu.device.type != "cpu" or torch.compiler.is_compiling()):
        return cu
    cu = check_cu_seqlens(cu, name)
    if int(cu[-1]) > tokens:
        raise ValueError(f"{name} must end at the number of tokens, {tokens}, or before, got {int(cu[-1])}")
    return cu


_DOCUMENTS = WeakIdKeyDictionary()  # position_ids -> (version or module, mask): read once for the layers of a forward


def _find_documents(module: nn.Module, position_ids: Tensor | None, batch: int) -> Mask | None:
    """Returns the mask of documents by the positions of every row; None if none start anew, or cannot be read."""
    if position_ids is None or torch.compiler.is_compiling() or len(position_ids) != batch:  # one row: the model's own
        return None
    known = _DOCUMENTS.get(position_ids)
    if position_ids.is_inference():  # no version tells whether it was changed: read anew when its reader comes again
        if known is None or known[0] is module:
            known = _DOCUMENTS[position_ids] = module, _read_documents(position_ids)
    elif known is None or known[0] != position_ids._version:
        known = _DOCUMENTS[position_ids] = position_ids._version, _read_documents(position_ids)
    return known[1]


def _read_documents(position_ids: Tensor) -> Mask | None:
    starts = find_starts(position_ids)
    return None if starts is None else Mask.documents(ids=starts.cumsum(-1))
