"""`regard.attention` on a sequence that is sharded over ranks: validate, agree, run the scheme, differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard import statistics
from regard._core.execute import check_policy_tensor
from regard._core.prepare import Call
from regard.masks import resolve_causal_bias
from regard.parallel.autograd import Apply, Sharded, Shared
from regard.parallel.call import Given
from regard.parallel.group import Line
from regard.parallel.plan import Plan
from regard.statistics import Statistics
from regard.temperature import Rows, visible_keys


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | str | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "balanced",
    normalizer: str = "softmax",
    temperature=None,
    softcap: float | None = None,
    sink: float | Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    return_stats: bool | str | tuple[str, ...] = False,
    backend: str | None = None,
    lengths: tuple[int, int] | None = None,
):
    """regard.attention(whole q, whole k, whole v, …), each rank giving its pieces and getting its queries' rows.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> x = torch.randn(1, 2, 8, 4)
    >>> q = k = v = regard.parallel.shard(x)
    >>> out, stats = regard.parallel.attention(q, k, v, is_causal=True, normalizer="entmax15", return_stats=True)
    >>> whole = regard.attention(x, x, x, is_causal=True, normalizer="entmax15")
    >>> bool(torch.allclose(regard.parallel.unshard(out), whole, atol=1e-6))
    True
    >>> torch.distributed.destroy_process_group()

    Ratio and pointwise maps go round a ring of keys, threshold maps visit the keys with their queries (docs/scale.md).
    The ranks compare types, shapes and options before anything travels; what one of them got wrong is raised on all.
    A rank that dies or stalls ends the call on every other rank with a `RankError` that names it.

    Args:
        q, k, v: this rank's pieces, cut by `regard.parallel.shard`.
        attn_mask: rows as q (cut by `shard(mask, dim=-2)`, or 1 row for all), columns of the whole sequence.
        temperature, sink: per query where they have as many rows as q, otherwise the same on every rank.
        window, key_lengths, is_causal: count positions of the whole sequence; key_lengths is the same on every rank.
        group: the ranks that share the sequence, or a DeviceMesh of them; None is all.
        layout: "balanced", or "contiguous", which takes pieces of any length, in the order of ranks.
        lengths: the whole (Lq, Lk), if known: checked against what all ranks hold together.

    All other arguments are those of `regard.attention`. Gradients of what every rank has the same of (a sink per head,
    a learned temperature, a mask without rows) are this rank's share: sum them over the group, as those of weights.
    """
    attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, getattr(q, "device", None))
    options = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
                   normalizer=normalizer, temperature=temperature, softcap=softcap, sink=sink, window=window,
                   key_lengths=key_lengths, return_stats=return_stats)  # fmt: skip
    return _answer(Given(q, k, v, options, layout, lengths, backend), group, Sharded())


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | str | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "balanced",
    normalizer: str = "softmax",
    temperature=None,
    softcap: float | None = None,
    sink: float | Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    return_stats: bool | str | tuple[str, ...] = False,
    backend: str | None = None,
    lengths: int | None = None,
):
    """regard.attention(q, whole k, whole v, …) for a few queries that every rank has: its keys' part, merged by a tree.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 8, 4)
    >>> out = regard.parallel.decode(q, regard.parallel.shard(k), regard.parallel.shard(k))
    >>> bool(torch.allclose(out, regard.attention(q, k, k), atol=1e-6))
    True
    >>> torch.distributed.destroy_process_group()

    The result, the same bits on every rank, takes ⌈log₂ W⌉ messages of the size of the output. Gradients of q and of
    whatever every rank has the same of are whole on every rank, given the same upstream gradient on every rank; those
    of k and v are of the rank's piece. `lengths` is the whole number of keys, if known. Arguments as `attention`'s.
    """
    attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, getattr(q, "device", None))
    options = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
                   normalizer=normalizer, temperature=temperature, softcap=softcap, sink=sink, window=window,
                   key_lengths=key_lengths, return_stats=return_stats)  # fmt: skip
    return _answer(Given(q, k, v, options, layout, lengths, backend, shared=True), group, Shared())


def _answer(given: Given, group, scheme):
    line = Line.of(group)
    plan, call, seed = given.planned(line)
    with line.telling():
        return _computed(plan, call, seed, scheme)


def _computed(plan: Plan, call: Call, seed: int, scheme):
    problem = plan.problem
    if problem.dropout_p:
        problem.seed = torch.tensor([seed], device=problem.q.device)
    temperature = call.temperature
    if call.policy is not None:
        temperature = _ask(plan, call, scheme)
        problem = replace(problem, temperature=temperature.expand(problem.q.shape[:3]))
        plan = replace(plan, problem=problem)
    names = statistics.with_gradient_inputs(problem.stats, problem.choice)
    plan.problem = replace(plan.problem, stats=names)
    given = plan.problem.q, plan.problem.k, plan.problem.v, call.bias, temperature, call.sink
    out, values = Apply.apply(plan, scheme, *given)
    out = out.reshape(*call.lead, *out.shape[-2:]).to(call.dtype)
    if call.wanted is None:
        return out
    found = dict(zip(names, values.to(call.problem.accumulator), strict=True))
    shaped = {name: found[name].reshape(out.shape[:-1]) for name in call.wanted}
    return out, Statistics(statistics.detach_others(shaped, problem.choice))


def _ask(plan: Plan, call: Call, scheme) -> Tensor:
    """The temperature that a policy gives for this rank's rows."""
    problem, own = plan.problem, scheme.spans(plan)
    batch, groups, _, d = problem.k.shape
    whole = replace(problem, k=problem.k.new_empty(()).expand(batch, groups, plan.total_keys, d))
    counts = [visible_keys(rows) for _, rows in plan.rows(whole, own)]

    def measure(names):
        plain = replace(
            problem, stats=statistics.with_gradient_inputs(statistics.resolve(names), problem.choice), dropout_p=0.0
        )
        given = problem.q, problem.k, problem.v, call.bias, call.temperature, call.sink
        values = Apply.apply(replace(plan, problem=plain), scheme, *given)[1]
        return dict(zip(plain.stats, values, strict=True))

    return check_policy_tensor(call, call.policy(torch.cat(counts, -1), Rows(call.queries, measure)))
