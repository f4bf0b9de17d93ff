"""kernel[(programs,)](*arguments) at a fraction of the host's time, for calls whose kind is known.

At every launch Triton looks at every argument (its type, whether it is 1 or a multiple of 16) to find the compiled
kernel: 15 to 25 µs, in a chain of short kernels more than they run. All of that follows from few facts about a call,
its `kind`; the second launch of a kind goes to the compiled kernel at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from regard._core.problem import Problem

MOST = 4096  # kinds of launches that are remembered
_compiled: dict[tuple, Any] = {}


def on_device_of(x: torch.Tensor) -> AbstractContextManager:
    """Where launches go to the GPU that x is on: Triton asks for the current one, whatever the arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def kind_of(p: Problem, *others: torch.Tensor) -> Hashable:
    """What the tensors of a call are to Triton; None where options bring more of them. `others` join q, k and v."""
    options = p.bias, p.mask, p.temperature, p.sink, p.key_lengths, p.seed, p.softcap
    if not p.q.is_cuda or any(option is not None for option in options):
        return None
    tensors = p.q, p.k, p.v, *others
    aligned = [tensor.data_ptr() % 16 == 0 for tensor in tensors]
    sizes = [(tensor.shape, tensor.stride()) for tensor in tensors]
    return p.q.dtype, p.q.device, p.reach, p.first_query, bool(p.stats), *aligned, *sizes


def kind_of_tensors(*tensors: torch.Tensor) -> Hashable:
    """The same of a launch whose tensors are these, and whose sizes and strides are among its arguments."""
    if not tensors[0].is_cuda:
        return None
    return tensors[0].device, *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]


def launch(kind: Hashable, kernel: Any, programs: int, arguments: tuple, constants: tuple = (), **options) -> None:
    """kernel[(programs,)](*arguments, *constants, **options).

    `constants` are the last parameters of the kernel, compile-time ones. Every tensor among the arguments is one that
    `kind` tells of or one that torch allocated for this call.
    """
    if kind is None:
        kernel[(programs,)](*arguments, *constants, **options)
        return
    plain = [
        x if x is None else (x == 1, x % 16 == 0, -(2**31) <= x < 2**31)
        for x in arguments
        if x is None or type(x) is int
    ]
    key = id(kernel), kind, constants, *options.items(), *plain
    found = _compiled.get(key)
    if found is None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = kernel, kernel[(programs,)](*arguments, *constants, **options)  # the kernel stays, and its id
    else:
        found[1][(programs, 1, 1)](*arguments, *constants)
