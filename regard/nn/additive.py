"""Attention with additive scores, s_ij = w·tanh(q_i + k_j), a block of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard import normalizers, statistics
from regard._call.options import check_policy_result, check_temperature
from regard._call.scores import soft_cap
from regard._core.rows.functions import normalize
from regard._facts import is_transformed
from regard.masks import blanked, dense
from regard.temperature.rows import Rows

BLOCK = 64  # queries scored at once


def attention(
    q: Tensor,  # [B, H, M, D]
    k: Tensor,  # [B, G, N, D]
    v: Tensor,  # [B, G, N, E]
    w: Tensor,  # [H, D]
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    normalizer: str | normalizers.Choice = "softmax",
    temperature: float | Tensor | Callable | None = None,
    cap: float | None = None,
    sink: Tensor | None = None,
    wanted: tuple[str, ...] = (),
) -> tuple[Tensor, statistics.Statistics]:
    """Return o_i = Σ_j p_ij·v_j with p_i = normaliser((cap(w·tanh(q_i + k_j)) + bias_ij) / T), and statistics.

    Blocks are recomputed in backward.
    """
    batch, heads, queries = q.shape[:3]
    policy = temperature if callable(temperature) and not isinstance(temperature, Tensor) else None
    if policy is None:
        check_temperature(temperature, (batch, heads), batch, heads, queries, q, is_learned=True)  # lets NaN through
    groups = heads // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    visible = dense(
        q.shape[2], k.shape[2], is_causal=is_causal, window_=window, key_lengths=key_lengths, device=q.device
    )
    visible, bias = _add_mask(visible, attn_mask)
    if visible is not None:
        k, v = blanked(visible, k, v)

    def block(q, k, v, visible, bias, first):
        s = torch.einsum("hd,bhmnd->bhmn", w, torch.tanh(q[:, :, :, None] + k[:, :, None]))
        if cap is not None:
            s = soft_cap(s.to(torch.promote_types(s.dtype, torch.float32)), cap)  # s/cap is 0 in float16
        s = s if bias is None else s + bias
        shown = torch.ones_like(s, dtype=torch.bool) if visible is None else visible.expand(s.shape)
        column = None if sink is None else sink[:, None, None].to(s.dtype).expand(*s.shape[:-1], 1)

        def measure(names):
            return statistics.of_scores(s, shown, normalizer, sink=column, first=first, names=names)

        t = temperature
        if policy is not None:
            counts = shown.sum(-1).to(torch.promote_types(s.dtype, torch.float32))
            t = check_policy_result(policy(counts, Rows(q, measure)), policy, counts.shape)[..., None]
        s = s if t is None else s / t
        stats = {}
        if wanted:
            measured = statistics.of_scores(s, shown, normalizer, sink=column, first=first, names=wanted)
            stats = statistics.detach_others(measured, normalizers.get(normalizer))
        if column is None:
            p = normalize(s, normalizer, mask=visible)
        else:  # one more key, without a value
            joined = torch.cat([s, column], -1), torch.cat([shown, torch.ones_like(column, dtype=torch.bool)], -1)
            p = normalize(joined[0], normalizer, mask=joined[1])[..., :-1]
        return F.dropout(p.to(v.dtype), dropout_p) @ v, stats

    # torch.func carries no saved-tensor hooks, and so no checkpoints
    run = partial(block) if is_transformed(q, k, v) else partial(checkpoint, block, use_reentrant=False)
    parts = []
    for first in range(0, max(queries, 1), BLOCK):  # one empty block if there are no queries
        rows = slice(first, first + BLOCK)
        cut = [x if x is None or x.shape[-2] == 1 else x[..., rows, :] for x in (visible, bias)]
        parts.append(run(q[:, :, rows], k, v, cut[0], cut[1], first))
    out = torch.cat([o for o, _ in parts], 2)
    stats = {name: torch.cat([stats[name] for _, stats in parts], 2) for name in wanted}
    return out, statistics.Statistics(stats)


def _add_mask(visible: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (visible pairs, bias) of the intervals and attn_mask, bool or additive, together."""
    if mask is None:
        return visible, None
    if mask.dtype == torch.bool:
        return (mask if visible is None else visible & mask), None
    shown = mask != -math.inf
    return (shown if visible is None else visible & shown), mask.masked_fill(~shown, 0.0)
