"""Second derivatives of torch's fused attention, whose backward has none: with create_graph=True its gradients are made
anew by torch's plain products, N × N, and have gradients themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FUSED = "ScaledDotProduct"  # how torch calls the backward nodes of its fused kernels


def differentiable_twice(out: Tensor, inputs: tuple[Tensor, ...], attend: Callable[..., Tensor]) -> Tensor:
    """out = attend(*inputs), whose gradients have gradients now; inputs are q, k and v.

    They are remembered until the first backward, which frees what torch has saved too; not at all where somebody else
    decides what is saved (checkpointing, offloading).
    """
    node = out.grad_fn
    if node is None or is_saved_elsewhere() or not node.name().startswith(FUSED):
        return out
    kept = list(inputs)

    def again(found: tuple[Tensor | None, ...], upstream: tuple[Tensor | None, ...]):
        if not torch.is_grad_enabled():
            kept.clear()
            return None
        wanted = [at for at, gradient in enumerate(found) if gradient is not None]
        shapes = {at: x.shape for at, x in enumerate(kept)}
        if upstream[0] is None or any(shapes.get(at) != found[at].shape for at in wanted):  # type: ignore[union-attr]
            return None
        own = [x.view_as(x) for x in kept]  # one may hang on another: each counts for itself
        with sdpa_kernel(SDPBackend.MATH):
            o = attend(*own)
        made = iter(torch.autograd.grad(o, [own[at] for at in wanted], upstream[0], create_graph=True))
        return tuple(next(made) if at in wanted else None for at in range(len(found)))

    node.register_hook(again)
    return out


def is_saved_elsewhere() -> bool:
    """True if saved-tensor hooks (checkpointing, offloading) decide what this forward saves for backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
