"""Checksums of weights and of batches, by which a snapshot is recognised."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def checksum_weights(model: torch.nn.Module) -> int:
    """Returns a checksum of the names and shapes of all weights, of their ends and of the sum of their bits."""
    checksum = 0
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x) or x.is_meta or x.layout != torch.strided:
            continue
        ends = x.detach().reshape(-1)
        checksum = zlib.crc32(f"{name} {tuple(x.shape)}".encode(), checksum)
        checksum = checksum_batch(torch.cat([ends[:64], ends[-64:]]), checksum)
        if not x.is_complex() and x.dtype.itemsize in BITS:
            checksum = zlib.crc32(str(int(ends.view(BITS[x.dtype.itemsize]).sum(dtype=torch.int64))).encode(), checksum)
    return checksum


def checksum_batch(x: Any, before: int = 0) -> int:
    """Returns a checksum of a batch, and of those before it."""
    if isinstance(x, Mapping):
        for name in sorted(x, key=str):
            before = checksum_batch(x[name], zlib.crc32(str(name).encode(), before))
    elif isinstance(x, (tuple, list)):
        for part in x:
            before = checksum_batch(part, before)
    elif isinstance(x, Tensor):
        before = zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode(), before)
        if x.layout == torch.strided and x.numel():
            before = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, before)
    elif hasattr(x, "__array_interface__"):  # numpy's
        before = checksum_batch(torch.as_tensor(x), before)
    else:
        before = zlib.crc32((repr(x) if isinstance(x, (int, float, str)) else type(x).__name__).encode(), before)
    return before
