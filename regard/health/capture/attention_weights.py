"""Output and weights of a call under `using`, where the caller wants the weights.

    p = dropout(normaliser((cap(scale·q kᵀ) + bias) / T)),    o = p·v

torch's MultiheadAttention wants them by default, an eager model of transformers with output_attentions. They are
N × N, and the output is computed from them. The causal order is in the mask; a sink is one more key without a value.
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
from regard._core.gate import apply_gate
from regard._core.options import AttentionOptions
from regard._core.prepare import prepare
from regard._core.problem import Problem
from regard._core.rows.validation import is_autocast, under_autocast
from regard.masks import blanked
from regard.reference import score_of, with_sink
from regard.scores import soft_cap

if TYPE_CHECKING:
    from regard.health.capture.call import Call


def output_and_weights(call: Call) -> tuple[Tensor, Tensor]:
    """Returns (o, p), [B, H, M, E] and [B, H, M, N], in the dtypes that torch would return."""
    options = AttentionOptions(dropout_p=call.dropout, **call.arguments)
    checked = apply_policy(prepare(call.q, call.k, call.v, options))
    p_dtype = under_autocast(call.q.new_empty(0, dtype=checked.dtype)).dtype
    with torch.autocast(call.q.device.type, enabled=False) if is_autocast(call.q) else contextlib.nullcontext():
        p, v = _weights(checked.problem)
        p = dropout(p, call.dropout) if call.dropout else p
        o = (p @ v).to(checked.dtype)
        return o if checked.gate is None else apply_gate(o, checked.gate), p.to(p_dtype)


def _weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns the weights, and the values with hidden rows zeroed."""
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
    if (score := score_of(problem)) is not None:
        i, j = (torch.arange(size, device=q.device) for size in s.shape[-2:])
        s = score.modify(s, (i if problem.interval is None else problem.interval[2])[..., None], j)
    s = s if bias is None else s + bias
    t = 1.0 if problem.temperature is None else problem.temperature[..., None]
    if problem.sink is not None:
        sink = problem.sink[..., None].to(wide)
        visible_keys = torch.ones_like(s, dtype=torch.bool) if visible is None else visible.expand(s.shape)
        return with_sink(problem.choice, s / t, visible_keys, sink), v
    return regard.normalize(s, problem.choice.spec, temperature=t, mask=visible), v
