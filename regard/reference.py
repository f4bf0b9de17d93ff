"""The dense float64 oracle: every option, written as one reads it; autograd is its backward.

It builds the N × N weights and is slow on purpose. Every other path is tested against it.

>>> import regard, torch
>>> q = k = v = torch.eye(2)[None, None]
>>> out, weights = regard.reference.attention(q, k, v, is_causal=True)
>>> weights[0, 0, 0]
tensor([1., 0.], dtype=torch.float64)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard import masks, normalizers, statistics
from regard._call import philox
from regard._call.arguments import AttentionOptions, takes_options
from regard._call.mask.attn_mask import find_positions, split_attn_mask
from regard._call.problem import Problem
from regard._call.score_function import ScoreFunction
from regard._call.scores import resolve_scale, soft_cap
from regard._facts import reference_dtype, widen
from regard.normalizers import Choice
from regard.temperature.rows import Rows

__all__ = ["attention"]


def normalize(
    scores: Tensor,
    normalizer: str | Choice = "softmax",
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    theta: Any = None,
) -> Tensor:
    """p = normaliser(s / temperature) on the last dimension, in float64."""
    choice = normalizers.get(normalizer)
    s = widen(scores) / temperature
    theta = choice.theta if theta is None else theta
    if callable(theta) and not isinstance(theta, Tensor):
        theta = theta((s != -math.inf if mask is None else mask & (s != -math.inf)).sum(-1).to(s.dtype))[..., None]
    return choice.reference(s, mask, theta)


def fenchel_young_loss(
    logits: Tensor,
    target: Tensor | None,
    normalizer: str | Choice = "softmax",
    *,
    ignore_index: int = -100,
    theta: Any = None,
) -> Tensor:
    """Ω*(z) − z_y on the last dimension, in float64, with Ω*(z) = max_p p·z + H_α(p), attained at p = normaliser(z).

    Without a target Ω*(z). 0 where the target is `ignore_index`; NaN where it is no class, and in rows that hold NaN or
    +inf, or nothing but −inf.
    """
    choice, z = normalizers.get(normalizer), widen(logits)
    theta = choice.theta if theta is None else theta
    alpha = choice.entropy_index(theta)
    if not isinstance(alpha, Tensor) and alpha == 1.0:
        potential = torch.logsumexp(z, -1)
    else:
        p = choice.reference(z, None, theta)
        zero = p == 0  # a NaN is none
        log = torch.log(p.masked_fill(zero, 1.0))
        k = torch.as_tensor(alpha - 1.0, dtype=z.dtype, device=z.device)
        surprise = torch.where(k > 0, torch.expm1(k * log) / k.where(k > 0, 1.0), log)
        potential = (p * (z.masked_fill(zero, 0.0) - surprise / (1.0 + k))).sum(-1)
    potential = potential.masked_fill(~(z.amax(-1).abs() < math.inf), math.nan)
    if target is None:
        return potential
    inside = (target >= 0) & (target < z.shape[-1])
    loss = potential - z.gather(-1, target.where(inside, 0)[..., None]).squeeze(-1)
    return loss.masked_fill(~inside, math.nan).masked_fill(target == ignore_index, 0.0)


@takes_options
def attention(
    q: Tensor, k: Tensor, v: Tensor, o: AttentionOptions, *, seed: Tensor | None = None, first_query: int = 0,
    queries: int | None = None, positions: Tensor | None = None,
) -> tuple:  # fmt: skip
    """softmax(scale·q kᵀ)·v and every option of `regard.attention`, dense, in float64: (out, weights[, stats]).

    The weights are those before dropout, which `seed` decides. q may be a block of `queries` that begins at
    `first_query`. `distance` counts from the index of a query, or from `positions`, which broadcasts to (…, Lq).

    Returns:
        (output, weights), or (output, weights, statistics) if `return_stats` is not False; all in float64 (float32 on
            a device without it), the weights (…, Hq, Lq, Lk).

    Raises:
        ValueError: The normaliser, a statistic or a word for the scale is unknown. Other arguments are not checked.
    """
    if o.backend is not None:
        raise ValueError(f"reference.attention is a backend itself, got backend={o.backend!r}")
    wanted = statistics.requested(o.return_stats)
    choice = normalizers.get(o.normalizer)
    key_lengths, sink, scale, temperature = o.key_lengths, o.sink, o.scale, o.temperature
    if key_lengths is not None and not isinstance(key_lengths, Tensor):
        key_lengths = torch.tensor(key_lengths, device=q.device)
    if sink is not None:
        sink = torch.as_tensor(sink, dtype=reference_dtype(q.device), device=q.device)
    if o.dropout_p > 0.0 and seed is None:
        seed = torch.randint(0, 2**62, (1,))
    given = split_attn_mask(o.attn_mask, o.is_causal, q.device)
    n, keys = q.shape[-2], k.shape[-2]
    q, k, v = (widen(x) for x in (q, k, v))
    if o.enable_gqa and q.ndim >= 3 and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = resolve_scale(scale, q.shape[-1])
    if isinstance(scale, Tensor) and scale.ndim:
        scale = widen(scale).reshape(-1, 1, 1)
    visible = torch.ones(n, keys, dtype=torch.bool, device=q.device)
    order: dict[str, Any] = dict(
        is_causal=given.is_causal, window_=o.window, key_lengths=key_lengths, first=first_query
    )
    interval = masks.dense(n, keys, **order, device=q.device)
    if interval is not None:
        visible = visible & _per_entry(interval, q)
    if given.mask is not None:
        visible = visible & _per_entry(given.mask.dense(n, keys, device=q.device), q)
        positions = find_positions(given.mask, n, keys, q.device) if positions is None else positions
    bias = None if given.bias is None else _per_entry(given.bias.dense(_as_four_dims(q), keys), q)
    for x in given.tensors:
        if x.dtype == torch.bool:
            visible = visible & x
            continue
        visible = visible & (x != -math.inf)
        finite = widen(x).masked_fill(x == -math.inf, 0.0)
        bias = finite if bias is None else bias + finite
    k, v = masks.blanked(visible, k, v)
    s = soft_cap(scale * (q @ k.transpose(-1, -2)), o.softcap)
    if o.score_mod is not None:
        i = torch.arange(n, device=q.device) + first_query if positions is None else positions
        s = o.score_mod.modify(s, i[..., None], torch.arange(keys, device=q.device))
    s = s if bias is None else s + bias
    visible = visible.expand(s.shape)
    s = s.masked_fill(~visible, 0.0)
    if sink is not None:
        sink = sink.reshape(-1, 1, 1) if sink.ndim == 1 else sink  # one per head
        sink = sink.expand(*s.shape[:-1], 1)
    theta = choice.theta
    if callable(theta) and not isinstance(theta, Tensor):
        theta = theta(visible.sum(-1).to(s.dtype))[..., None]
    if isinstance(theta, Tensor):
        theta = widen(_per_row(theta, s.shape[:-1]))
        choice = Choice(choice.normalizer, theta.expand(*s.shape[:-1], 1))
    rows: dict[str, Any] = dict(first=first_query, positions=positions)
    if temperature is not None:
        t: Any = temperature
        if callable(temperature):  # a policy: from the visible keys, the queries, what it asks to be measured
            logits = s

            def measure(names):
                return statistics.of_scores(logits, visible, choice, sink=sink, names=names, **rows)

            t = temperature(visible.sum(-1).to(s.dtype), Rows(q, measure))[..., None]
        s = s / (widen(t) if isinstance(t, Tensor) else t)
    if sink is not None:
        p = with_sink(choice, s, visible, sink)
    else:
        p = choice.reference(s, visible, choice.theta)
    lost = (visible & ~(s < math.inf)).any(-1, keepdim=True)  # a NaN or +inf among the logits: no weights
    p = p.masked_fill(lost, math.nan)
    dropped = p
    if o.dropout_p > 0.0:
        assert seed is not None  # drawn above
        keep = philox.keep(seed, p.shape, o.dropout_p, first_query, queries).to(p.device)
        dropped = p * keep / (1.0 - o.dropout_p)
    out = dropped @ v
    if o.gate is not None:
        out = out * torch.sigmoid(widen(o.gate if o.gate.ndim == out.ndim else o.gate[..., None]))
    if wanted is None:
        return out, p
    return out, p, statistics.of_scores(s, visible, choice, sink=sink, names=wanted, **rows)


def _per_entry(x: Tensor, q: Tensor) -> Tensor:
    """x [B or 1, H or 1, M, N] as it broadcasts over q (…, M, D), whose dims before the heads are the batch."""
    if x.ndim != 4 or q.ndim == 4:
        return x
    if q.ndim > 4:
        return x.reshape(*(q.shape[:-3] if x.shape[0] > 1 else (1,)), *x.shape[1:])
    return x.squeeze(0) if x.shape[1] > 1 else x.squeeze(1)  # of heads, or of entries (N, M, D)


def _per_row(theta: Tensor, rows: torch.Size) -> Tensor:
    """A parameter (H,), (…, H, M) or broadcasting to (…, H, M, 1), as the last of these."""
    if theta.ndim == 1:
        return theta.reshape(-1, 1, 1)
    return theta[..., None] if theta.shape == rows else theta


def _as_four_dims(q: Tensor) -> Tensor:
    return q[(None,) * (4 - q.ndim)] if q.ndim < 4 else q.reshape(-1, *q.shape[-3:])


def with_sink(choice, s: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """exp(s) / (rest + exp(sink) + Σ exp(s)): the softmax family with one more, silent, key."""
    joined = torch.cat([s, sink], -1)
    seen = torch.cat([visible, torch.ones_like(sink, dtype=torch.bool)], -1)
    return choice.reference(joined, seen, choice.theta)[..., :-1]


BLOCK, SCORES = 512, 1 << 24  # queries, and scores of all heads, that are computed at once


def of_problem(problem: Problem) -> tuple[Tensor, Tensor]:
    """A validated problem through the oracle: (o, stats stacked), float64, differentiable.

    Long sequences go block by block, each recomputed in backward, so that memory stays O(N).
    """
    count, begin = problem.q.shape[2], problem.first_query
    total = count if problem.queries is None else problem.queries
    step = max(16, min(BLOCK, SCORES // max(1, problem.q.shape[:2].numel() * problem.k.shape[2])))
    if count <= step:
        return _of_block(problem, begin, total)
    blocks = [
        checkpoint(_of_block, problem.block(first, first + step), begin + first, total, use_reentrant=False)
        for first in range(0, count, step)
    ]
    return torch.cat([o for o, _ in blocks], -2), torch.cat([stats for _, stats in blocks], -1)


def of_whole(problem: Problem) -> tuple[Tensor, Tensor]:
    """(o, statistics) of a problem in one piece, without checkpoints."""
    return _of_block(problem, 0, problem.q.shape[2])


def of_rows(problem: Problem, first: int, last: int) -> tuple[Tensor, Tensor]:
    """(o, statistics) of the queries first … last − 1, at their positions among all of them."""
    total = problem.q.shape[2]
    return _of_block(problem.block(first, min(last, total)), first, total)


def weights_of_rows(problem: Problem, first: int, last: int) -> Tensor:
    """The weights [B, H, last − first, N] of some queries of a problem, at their positions among all of them."""
    total = problem.q.shape[2]
    return _attend_block(replace(problem.block(first, min(last, total)), stats=()), first, total)[1]


def _of_block(problem: Problem, first: int, total: int) -> tuple[Tensor, Tensor]:
    result = _attend_block(problem, first, total)
    stats = result[2] if problem.stats else {}
    rows = problem.q.shape[:-1]
    stacked = torch.stack([stats[name] for name in problem.stats]) if stats else result[0].new_zeros((0, *rows))
    return result[0], stacked


def _attend_block(problem: Problem, first: int, total: int) -> tuple:
    window = None if problem.left is None and problem.right is None else (problem.left, problem.right)
    theta = problem.theta
    return attention(
        problem.q,
        problem.k,
        problem.v,
        joined_mask(problem),
        problem.dropout_p,
        problem.causal,
        problem.scale,
        enable_gqa=True,
        normalizer=problem.choice if theta is None else Choice(problem.choice.normalizer, theta[..., None]),
        temperature=None if problem.temperature is None else problem.temperature[..., None],
        softcap=problem.softcap,
        score_mod=score_of(problem),
        sink=None if problem.sink is None else problem.sink[..., None],
        window=window,
        key_lengths=problem.key_lengths,
        return_stats=problem.stats or False,
        seed=problem.seed,
        first_query=first,
        queries=total,
        positions=None if problem.interval is None else problem.interval[2],
    )


def score_of(problem: Problem) -> ScoreFunction | None:
    """The score function of a problem with the problem's own parameters; None without one."""
    if problem.score is None:
        return None
    return problem.score.with_params(*(() if problem.score_params is None else problem.score_params))


def joined_mask(problem: Problem) -> Tensor | None:
    """Mask, interval and every bias of a problem as one tensor that broadcasts to [B, H, M, N]."""
    mask, bias = problem.mask, problem.bias
    if problem.interval is not None:
        visible = masks.interval(problem.interval[0], problem.interval[1], problem.k.shape[2])
        mask = visible if mask is None else mask & visible
    added = bias if bias is None else widen(bias)
    if problem.row_bias is not None:
        row = widen(problem.row_bias)[..., None]
        added = row if added is None else added + row
    if problem.relative is not None:
        table = masks.spread_relative(widen(problem.relative), problem.q.shape[2], problem.k.shape[2])
        added = table if added is None else added + table
    if added is None or mask is None:
        return mask if added is None else added
    return added.masked_fill(~mask, -math.inf)
