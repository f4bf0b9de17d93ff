"""Modes that record or rewrite calls: compilers, tracers, torch.func transforms, forward mode, function modes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from regard._facts.readable import is_mapped


def is_plain_eager() -> bool:
    """True if nothing records or rewrites calls: no compiler, mode, torch.func transform or forward-mode level."""
    return not (
        is_compiling()
        or _get_tracing_state() is not None
        or _len_torch_function_stack()
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed(*tensors: Tensor | None) -> bool:
    """True if a tensor has a tangent, or torch.func wants its gradient: what the fused ops cannot carry."""
    if torch.compiler.is_compiling():
        return _is_within_transform()
    given = [x for x in tensors if x is not None]
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and any(forward.unpack_dual(x).tangent is not None for x in given):
        return True
    return any(is_mapped(x) or x.requires_grad for x in given) and _is_within_transform()


def _is_within_transform() -> bool:
    return any("Jvp" in kind or "Grad" in kind for kind in _active_transforms())


# torch guards a graph by the transforms that it was made in. torch.compiler.assume_constant_result sets this mark too,
# but imports all of torch._dynamo.
_is_within_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_within_vmap() -> bool:
    """True if one of the active torch.func transforms is vmap."""
    return any("Vmap" in kind for kind in _active_transforms())


def _active_transforms() -> list[str]:
    return [str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()]
