"""Is it the same model and the same data again? Checksums of weights and of batches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def weights_mark(model: torch.nn.Module) -> int:
    """A checksum of the names, shapes and types of all weights, of their ends and of the sum of their bits."""
    mark = 0
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x) or x.is_meta or x.layout != torch.strided:
            continue
        ends = x.detach().reshape(-1)
        mark = zlib.crc32(f"{name} {tuple(x.shape)}".encode(), mark)
        mark = batch_mark(torch.cat([ends[:64], ends[-64:]]), mark)
        if not x.is_complex() and x.dtype.itemsize in BITS:
            mark = zlib.crc32(str(int(ends.view(BITS[x.dtype.itemsize]).sum(dtype=torch.int64))).encode(), mark)
    return mark


def batch_mark(x, before: int = 0) -> int:
    """A checksum of a batch, and of those before it."""
    if isinstance(x, Mapping):
        for name in sorted(x, key=str):
            before = batch_mark(x[name], zlib.crc32(str(name).encode(), before))
    elif isinstance(x, (tuple, list)):
        for part in x:
            before = batch_mark(part, before)
    elif isinstance(x, Tensor):
        before = zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode(), before)
        if x.layout == torch.strided and x.numel():
            before = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), before)
    elif hasattr(x, "__array_interface__"):  # numpy's
        before = batch_mark(torch.as_tensor(x), before)
    else:
        before = zlib.crc32((repr(x) if isinstance(x, (int, float, str)) else type(x).__name__).encode(), before)
    return before
