"""Sends the commonest call on a GPU, softmax with a scale and causal order, straight to its kernel.

`regard.attention` checks every argument and serves autograd, transforms and the compiler, which costs the host half a
millisecond a call, where a layer of a model takes a few. The model has checked its call, and the output is compared
with the model's own. Every other call goes through `regard.attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from regard import normalizers
from regard._core.dispatch import widest
from regard._core.problem import Problem
from regard.health.capture.call import Call
from regard.statistics.names import NAMES, Statistics


def attention_directly(call: Call) -> tuple[Tensor, Statistics] | None:
    """Returns (output, statistics) of a plain call on a GPU, None for any other."""
    q, k, v = call.q.detach(), call.k.detach(), call.v.detach()
    if not (is_plain(call) and q.dtype == k.dtype == v.dtype and q.numel() and k.numel() and v.numel()):
        return None
    if q.shape[1] % k.shape[1] or torch.is_autocast_enabled("cuda"):
        return None
    if max(q.shape[-1], v.shape[-1]) > widest(q.device, q.element_size()):
        return None
    from regard._backends.gpu.attention import launch as kernels

    scale = call.options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else None  # laid out as q, as the model expects
    problem = Problem(q, k, v, _softmax(), scale, causal=call.causal, stats=NAMES)
    o, stacked = kernels.attend(problem, out)
    return o, Statistics.of_stacked(stacked, NAMES, NAMES, problem.choice)


def is_plain(call: Call) -> bool:
    """True for softmax of equal batches without a mask, the scale a number or None; causal order and dropout aside."""
    if call.mask is not None or not call.q.shape[0] == call.k.shape[0] == call.v.shape[0]:
        return False
    others = (value for name, value in call.options.items() if name not in ("scale", "normalizer"))
    has_number = isinstance(call.options.get("scale"), (int, float, type(None)))
    return has_number and call.options.get("normalizer") in (None, "softmax") and all(x is None for x in others)


@cache
def _softmax():
    return normalizers.get("softmax")


def stack_statistics(stats: Mapping[str, Tensor]) -> Tensor:
    """Returns all statistics in one tensor, [S, B, H, M] in the order of `NAMES`; the one they are views of, if any."""
    known = stats._stacked if isinstance(stats, Statistics) else None
    if known is not None and known[1] == NAMES:
        return known[0].contiguous()
    return torch.stack([stats[name] for name in NAMES])
