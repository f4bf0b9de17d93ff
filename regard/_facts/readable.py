"""Tests whether the values of a tensor can be read now."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def readable(x: Tensor) -> bool:
    """True if the values can be read without a device sync (CPU tensor; not fake, meta, traced or vmapped)."""
    return x.device.type == "cpu" and not has_no_values(x)


def has_no_values(x: Tensor) -> bool:
    """True while tracing, and of vmapped, fake and meta tensors."""
    return torch.compiler.is_compiling() or is_mapped(x) or x.is_meta or isinstance(x, FakeTensor) or _is_recorded()


def _is_recorded() -> bool:
    """True inside make_fx, which records operations on tensors that do have values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_mapped(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
