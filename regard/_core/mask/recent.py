"""Keeps the masks of the last packed calls: the layers of a model pass the same cu_seqlens one after another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from regard._core.ops.backends import is_plain_eager
from regard._core.readable import readable
from regard.mask import Mask

MOST = 4
_recent: dict[Hashable, tuple[list[weakref.ref], Mask]] = {}


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
    mask = make()
    for old in list(_recent)[: max(0, len(_recent) + 1 - MOST)]:
        _recent.pop(old, None)  # another thread may have been faster
    _recent[key] = [weakref.ref(x) for x in on_gpu], mask
    return mask
