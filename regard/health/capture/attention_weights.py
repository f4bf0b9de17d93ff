"""The weights of a call that `using` leads, where its caller wants them, as torch's MultiheadAttention does by default
and an eager model of transformers with output_attentions.

    p = dropout(normaliser((cap(scale·q kᵀ) + bias) / T)),    o = p·v

Output and weights are of one p, N × N as it was asked for. T is what `regard.attention` would divide by. The causal
order is in the mask, where torch looks for it too when weights are wanted; windows and lengths it has none of. A sink
is one more key, without a value and without a column in p.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import dropout

import regard
from regard._core.execute import apply_policy
from regard._core.options import AttentionOptions
from regard._core.prepare import prepare
from regard._core.rows.validation import is_autocast, under_autocast
from regard.masks import blanked
from regard.reference import with_sink
from regard.scores import soft_cap

if TYPE_CHECKING:
    from regard.health.capture.call import Call


def weighed(call: Call) -> tuple[Tensor, Tensor]:
    """(o, p), [B, H, M, E] and [B, H, M, N], in the dtypes that torch's would have."""
    options = AttentionOptions(dropout_p=call.dropout, **call.arguments)
    checked = apply_policy(prepare(call.q, call.k, call.v, options))
    shown = under_autocast(call.q.new_empty(0, dtype=checked.dtype)).dtype
    with torch.autocast(call.q.device.type, enabled=False) if is_autocast(call.q) else contextlib.nullcontext():
        p, v = _weights(checked.problem)
        p = dropout(p, call.dropout) if call.dropout else p
        return (p @ v).to(checked.dtype), p.to(shown)


def _weights(problem) -> tuple[Tensor, Tensor]:
    """p, and the values it weighs."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # heads that share them
    bias, visible = problem.bias, problem.mask
    if bias is not None:
        visible = bias != -math.inf
        bias = bias.masked_fill(~visible, 0.0)
    if visible is not None:
        k, v = blanked(visible, k, v)
    s = soft_cap((problem.scale * q) @ k.transpose(-1, -2), problem.softcap)
    s = s if bias is None else s + bias
    t = 1.0 if problem.temperature is None else problem.temperature[..., None]
    if problem.sink is not None:
        sink = problem.sink[..., None].to(wide)
        seen = torch.ones_like(s, dtype=torch.bool) if visible is None else visible.expand(s.shape)
        return with_sink(problem.choice, s / t, seen, sink), v
    return regard.normalize(s, problem.choice.spec, temperature=t, mask=visible), v
