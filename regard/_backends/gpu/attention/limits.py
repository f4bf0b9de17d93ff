"""Reasons why a kernel cannot take a call, in plain words: what every `supports` function is made of."""

from __future__ import annotations

import torch

from regard._call import problem
from regard._call.problem import Problem
from regard._facts import multiplies_from_shared_memory, supports_gluon

GLUON_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def find_option(p: Problem, *names: str) -> str | None:
    """Name the first of these options that the call has; dropout counts as one always."""
    return problem.find_option(p, *names, "dropout_p")


def find_gluon_obstacle(p: Problem) -> str | None:
    """Say why no Gluon kernel can take the call: its device or its dtype."""
    if not p.q.is_cuda:
        return "tensors not on a GPU"
    if p.q.dtype not in GLUON_TYPES:
        return f"{str(p.q.dtype).removeprefix('torch.')} (bfloat16 and float16 only)"
    return None if supports_gluon(p.q.device) else "no Hopper GPU with Triton 3.6 or later"


def find_layout_obstacle(*tensors: torch.Tensor) -> str | None:
    """Say why bulk copies cannot read these tensors."""
    return None if all(map(is_bulk_readable, tensors)) else "strides or addresses that are no multiples of 16 bytes"


def is_bulk_readable(x: torch.Tensor) -> bool:
    """True if a tensor descriptor may describe x: contiguous columns, other strides and the address 16-byte aligned."""
    *steps, last = x.stride()
    size, odd = x.element_size(), x.data_ptr()
    for step in steps:
        if step <= 0:
            return False
        odd |= step * size
    return last == 1 and odd % 16 == 0


def can_bulk_copy(*tensors: torch.Tensor) -> bool:
    """True if bulk copies can read all these tensors, on a GPU whose products read what they copy."""
    return multiplies_from_shared_memory(tensors[0].device) and all(map(is_bulk_readable, tensors))
