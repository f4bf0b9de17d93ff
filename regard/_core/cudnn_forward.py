"""torch's fused attention, by cuDNN's kernel where that is the fastest of torch's: Hopper GPUs and later.

torch asks for cuDNN last. `attend` asks for it first; `choose_attention` finds out once whether torch may take it, and
saves the calls after that the 40 µs that the asking takes. Where `sdpa_kernel(…)` or a setting leaves fewer kernels or
another order, torch's own choice stands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from regard._call.problem import Problem
from regard._facts import allowed_backends, has_bulk_copies

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
STEP = ORDER[1:]  # of one query: cuDNN builds a plan for every number of keys, which takes 54 ms each on an H200
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default


def prefers_cudnn(device: torch.device) -> bool:
    """True if cuDNN's attention is the fastest of torch's on a device."""
    return device.type == "cuda" and has_bulk_copies(device) and allowed_backends() is None


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's attention of these tensors and options."""
    if not prefers_cudnn(q.device):
        return scaled_dot_product_attention(q, k, v, **options)
    if q.shape[-2] != 1 or torch.compiler.is_compiling():
        with sdpa_kernel(STEP) if q.shape[-2] == 1 else sdpa_kernel(ORDER, set_priority=True):
            return scaled_dot_product_attention(q, k, v, **options)
    torch._C._set_sdp_use_cudnn(False)  # `sdpa_kernel` takes the host as long as a small kernel runs
    try:
        return scaled_dot_product_attention(q, k, v, **options)
    finally:
        torch._C._set_sdp_use_cudnn(True)  # `prefers_cudnn` found all of them allowed


def choose_attention(problem: Problem) -> tuple[Attend, Attend]:
    """Return what `attend` does for tensors like those of a problem without a mask, and torch's function itself."""
    grouped = problem.q.shape[1] != problem.k.shape[1]
    plain = partial(scaled_dot_product_attention, is_causal=problem.causal, scale=problem.scale, enable_gqa=grouped)
    if prefers_cudnn(problem.q.device):
        if problem.q.shape[2] == 1:
            return partial(attend, is_causal=problem.causal, scale=problem.scale, enable_gqa=grouped), plain
        given = SDPAParams(problem.q, problem.k, problem.v, None, 0.0, problem.causal, grouped)
        chosen = torch._fused_sdp_choice(problem.q, problem.k, problem.v, None, 0.0, problem.causal, enable_gqa=grouped)
        if chosen != SDPBackend.CUDNN_ATTENTION.value and can_use_cudnn_attention(given):
            return partial(_attend_by_cudnn, problem.causal, problem.scale), plain
    return plain, plain


def _attend_by_cudnn(causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    records = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return cudnn_attention(q, k, v, None, records, 0.0, causal, False, scale=scale)[0]
