"""The arguments of attention, checked and brought to [B, H, M, D]."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import normalizers, statistics
from regard._core import ops
from regard._core.dispatch import Path, choose
from regard._core.problem import Problem
from regard._core.rows.validation import check_flag
from regard._core.validation import (
    autocast,
    check_cap,
    check_lengths,
    check_mask,
    check_range,
    check_scale,
    check_sink,
    check_size,
    check_temperature,
    check_tensors,
    check_window,
    divided,
    folded,
    leading,
    to_query_heads,
)
from regard.masks import unbiased
from regard.scores import resolve_scale


@dataclass
class Call:
    """The arguments checked and brought to [B, H, M, D]."""

    problem: Problem
    bias: Tensor | None  # as given, 4-dim, not expanded
    mask: Tensor | None
    temperature: Tensor | None  # 3-dim, not expanded
    sink: Tensor | None
    policy: object | None
    queries: Tensor  # [B, H, M, D] as given, which a policy reads: problem.q may hold a scale per head
    wanted: tuple[str, ...] | None  # None: the output alone
    lead: tuple[int, ...]  # (…, H)
    dtype: torch.dtype  # of the result
    path: Path

    @classmethod
    def of(
        cls, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, sink,
        window, key_lengths, return_stats, backend,
    ) -> Call:  # fmt: skip
        wanted = statistics.asked(return_stats)
        choice = normalizers.get(normalizer).simplest
        check_tensors(q, k, v)
        rank = max(q.ndim, k.ndim, v.ndim)
        q, k, v = (x[(None,) * (rank - x.ndim)] for x in (q, k, v))
        attn_mask, is_causal = unbiased(attn_mask, is_causal, q.device)
        q, k, v, attn_mask = autocast(q, k, v, attn_mask)
        dtype = q.dtype
        if not isinstance(dropout_p, numbers.Real) or not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p!r}")
        if dropout_p and wanted:
            raise ValueError(
                "return_stats with dropout_p > 0 is undefined: statistics describe the weights used, and dropout uses "
                "a random part of them; measure with dropout_p=0.0 (evaluation mode)"
            )
        is_causal, enable_gqa = check_flag(is_causal, "is_causal"), check_flag(enable_gqa, "enable_gqa")
        if enable_gqa and rank > 2 and k.shape[-3] != v.shape[-3]:
            k, v = to_query_heads(k, "k", q), to_query_heads(v, "v", q)
        lead, batch, heads, kv_heads = leading(q, k, v, enable_gqa, key_lengths, sink)
        queries, keys = q.shape[-2], k.shape[-2]
        q = q.expand(*lead, *q.shape[-2:]).reshape(batch, heads, *q.shape[-2:])
        kv_lead = lead if heads == 1 else (*lead[:-1], kv_heads)
        k, v = (x.expand(*kv_lead, *x.shape[-2:]).reshape(batch, kv_heads, *x.shape[-2:]) for x in (k, v))
        scale = resolve_scale(scale, q.shape[-1])
        given, per_head = q, None
        if isinstance(scale, Tensor):
            per_head, scale = check_scale(scale, heads, q), 1.0
        bias = mask = None
        if attn_mask is not None:
            shaped = check_mask(attn_mask, lead, batch, heads, queries, keys, q)
            bias, mask = (None, shaped) if shaped.dtype == torch.bool else (shaped, None)
        left, right = check_window(window)
        softcap = check_cap(softcap, q)
        policy, learned = None, False
        if isinstance(temperature, type):
            raise TypeError(f"temperature must be a policy, got the class {temperature.__name__}; make one of it")
        if callable(temperature) and not isinstance(temperature, Tensor):
            settled = getattr(temperature, "value", None)  # of a policy that asks nothing of the rows
            policy, temperature = (temperature, None) if settled is None else (None, settled)
            learned = settled is not None
        number, tensor = check_temperature(temperature, lead, batch, heads, queries, q, learned=learned)
        if per_head is not None:
            if q.dtype in (torch.float32, torch.float64):
                q = q * per_head
            elif softcap is None and bias is None and backend != "torch":  # q·scale would be rounded to 16 bits
                factor, own = folded(per_head)
                q, own = q * factor.to(q.dtype), own.reshape(1, -1, 1)
                check_range(number, q)
                number, tensor = 1.0, own * number if tensor is None else own * tensor
            else:
                q, k, v = q.float() * per_head, k.float(), v.float()
        if number != 1.0:
            if softcap is None and bias is None:
                scale = divided(scale, number, q)
            else:
                check_range(number, q)
                tensor = q.new_full((1, 1, 1), number, dtype=ops.accumulator(q.dtype))
        check_size(scale, q)
        problem = Problem(
            q=q,
            k=k,
            v=v,
            choice=choice,
            scale=scale,
            softcap=softcap,
            bias=None if bias is None else bias.expand(batch, heads, queries, keys),
            mask=None if mask is None else mask.expand(batch, heads, queries, keys),
            temperature=None if tensor is None else tensor.expand(batch, heads, queries),
            key_lengths=check_lengths(key_lengths, batch, keys, q),
            causal=bool(is_causal),
            left=left,
            right=right,
            dropout_p=float(dropout_p),
            stats=wanted or (),
        )
        sink = check_sink(sink, choice, heads, lead, batch, queries, q)
        problem.sink = None if sink is None else sink.expand(batch, heads, queries)
        path = choose(problem, policy, backend)
        return cls(problem, bias, mask, tensor, sink, policy, given, wanted, lead, dtype, path)
