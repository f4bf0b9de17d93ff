"""Whether one may look at a tensor's values, to check them or to take a shorter way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def readable(x: Tensor) -> bool:
    """Are there values, and does a look at them cost no wait?"""
    return x.device.type == "cpu" and not has_no_values(x)


def has_no_values(x: Tensor) -> bool:
    """While tracing, mapped, fake or on `meta`."""
    return torch.compiler.is_compiling() or is_mapped(x) or x.is_meta or isinstance(x, FakeTensor)


def is_mapped(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
