"""Keeps the masks of the last packed calls: the layers of a model pass the same cu_seqlens one after another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from regard._core.ops.backends import is_plain_eager
from regard.mask import Mask

MOST = 4
_recent: dict[Hashable, tuple[list[weakref.ref], Mask]] = {}


def recall(given: tuple[object, ...], options: tuple, make: Callable[[], Mask]) -> Mask:
    """Return make(), or what it returned lately for the same options and the same tensors, unchanged since.

    Not while something records calls: the work of `make` belongs to the record then.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) < len(given) or any(x.is_inference() for x in tensors) or not is_plain_eager():
        return make()
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return make()
    key = options, *((id(x), x._version) for x in tensors)
    found = _recent.get(key)
    if found is not None and all(known() is x for known, x in zip(found[0], tensors, strict=True)):
        return found[1]
    mask = make()
    for old in list(_recent)[: max(0, len(_recent) + 1 - MOST)]:
        _recent.pop(old, None)  # another thread may have been faster
    _recent[key] = [weakref.ref(x) for x in tensors], mask
    return mask
