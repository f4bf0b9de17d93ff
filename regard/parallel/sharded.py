"""`attention` and `decode` on a sequence that is sharded over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard import statistics
from regard._call.arguments import AttentionOptions, takes_options
from regard._core.execute import check_policy_tensor
from regard._core.formulas import apply_gate
from regard._core.prepare import PreparedCall
from regard.parallel import reference_rows, ring, tree
from regard.parallel.autograd import ParallelAttention
from regard.parallel.call import ShardedCall
from regard.parallel.group import Group, RankGroup
from regard.parallel.plan import ShardPlan
from regard.statistics import Statistics
from regard.temperature.rows import Rows, visible_keys


@takes_options
def attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, group: Group = None, layout: str = "balanced"
) -> Tensor | tuple[Tensor, Statistics]:
    """Compute regard.attention of a sharded sequence: each rank passes its shards and gets the rows of its queries.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> x = torch.randn(1, 2, 8, 4)
    >>> q = k = v = regard.parallel.shard(x)
    >>> out, stats = regard.parallel.attention(q, k, v, is_causal=True, normalizer="entmax15", return_stats=True)
    >>> whole = regard.attention(x, x, x, is_causal=True, normalizer="entmax15")
    >>> bool(torch.allclose(regard.parallel.unshard(out), whole, atol=1e-6))
    True
    >>> torch.distributed.destroy_process_group()

    For ratio and pointwise maps keys go round a ring; for threshold maps and statistics every rank gathers all keys
    (docs/developers/parallel.md).
    The ranks compare types, shapes and options first; an error of one rank is raised on all. If a rank dies or stalls,
    the call ends on every other rank with a `RankError`, at the latest after the group's timeout.

    Args:
        q, k, v: this rank's shards (…, length, head_dim), cut by `regard.parallel.shard`.
        attn_mask: rows as q (cut by `shard(mask, dim=-2)`, or 1 row for all), columns of the whole sequence. Or a
            `regard.Mask` of the whole sequence, the same on every rank.
        gate: rows as q.
        temperature, sink: per query where they have as many rows as q, otherwise the same on every rank.
        window, key_lengths, is_causal: count positions of the whole sequence; key_lengths is the same on every rank.
        group: the ranks that share the sequence, or a DeviceMesh of them; None is all.
        layout: "balanced", or "contiguous", which takes shards of any length, in the order of ranks.

    Returns:
        The output of this rank's queries, or the pair (output, statistics) if `return_stats` is not False.

    Raises:
        TypeError: As `regard.attention` raises it; an error of one rank is raised on all.
        ValueError: As `regard.attention` raises it, or the ranks differ in types, shapes or options.
        RankError: Another rank died or stalled.

    All other arguments are those of `regard.attention`. Gradients of what is the same on every rank (a sink per head,
    a learned temperature, a mask without rows) are this rank's share: sum them over the group, as those of weights.
    """
    return _run(ShardedCall(q, k, v, options, layout), group, ring)


@takes_options
def decode(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, group: Group = None, layout: str = "balanced"
) -> Tensor | tuple[Tensor, Statistics]:
    """Compute regard.attention of a few queries that every rank has and sharded keys, merged by a tree.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 8, 4)
    >>> out = regard.parallel.decode(q, regard.parallel.shard(k), regard.parallel.shard(k))
    >>> bool(torch.allclose(out, regard.attention(q, k, k), atol=1e-6))
    True
    >>> torch.distributed.destroy_process_group()

    The result has the same bits on every rank and takes ⌈log₂ W⌉ messages of the size of the output (for threshold maps
    and statistics all keys are gathered). A bias has no gradient. Given the same
    upstream gradient on every rank, gradients of q and of other replicated arguments are whole on every rank; those of
    k and v are of the rank's shard. Other arguments as in `attention`.

    Returns:
        The output, or the pair (output, statistics) if `return_stats` is not False; the same on every rank.

    Raises:
        TypeError: As `regard.parallel.attention` raises it.
        ValueError: As `regard.parallel.attention` raises it.
        RankError: Another rank died or stalled.
    """
    return _run(ShardedCall(q, k, v, options, layout, shared=True), group, tree)


def _run(arguments: ShardedCall, group: Group, scheme):
    ranks = RankGroup.from_torch(group)
    plan, call, seed = arguments.make_plan(ranks)
    with ranks.drain_on_error():
        return _compute(plan, call, seed, scheme)


def _compute(plan: ShardPlan, call: PreparedCall, seed: int, scheme):
    problem = plan.problem
    if problem.dropout_p:
        problem.seed = torch.tensor([seed], device=problem.q.device)
    temperature = call.given["temperature"]
    if call.policy is not None:
        temperature = _evaluate_policy(plan, call, scheme)
        problem = replace(problem, temperature=temperature.expand(problem.q.shape[:3]))
        plan = replace(plan, problem=problem)
    names = statistics.with_gradient_inputs(problem.stats, problem.choice)
    plan.problem = replace(plan.problem, stats=names)
    inputs = plan.problem.q, plan.problem.k, plan.problem.v, call.given["bias"], temperature, call.given["sink"]
    out, values = ParallelAttention.apply(plan, scheme, *inputs)
    out = out.reshape(*call.lead, *out.shape[-2:]).to(call.dtype)
    out = out if call.gate is None else apply_gate(out, call.gate)
    if call.wanted is None:
        return out
    found = dict(zip(names, values.to(call.problem.accumulator), strict=True))
    shaped = {name: found[name].reshape(out.shape[:-1]) for name in call.wanted}
    return out, Statistics(statistics.detach_others(shaped, problem.choice))


def _evaluate_policy(plan: ShardPlan, call: PreparedCall, scheme) -> Tensor:
    """Return the temperature that the policy gives this rank's rows."""
    assert call.policy is not None
    problem, own = plan.problem, plan.queries[plan.group.rank]
    batch, groups, _, d = problem.k.shape
    whole = replace(problem, k=problem.k.new_empty(()).expand(batch, groups, plan.total_keys, d))
    counts = [visible_keys(rows) for _, rows in plan.rows(whole, own)]

    def measure(names):
        order = statistics.with_gradient_inputs(statistics.resolve(names), problem.choice)
        unit = replace(problem, stats=order, dropout_p=0.0)
        inputs = problem.q, problem.k, problem.v, *(call.given[name] for name in ("bias", "temperature", "sink"))
        kernels = plan.kernels if problem.choice.merges else reference_rows  # no kernel's sums give the others'
        measured = replace(plan, problem=unit, engine=None, kernels=kernels)
        values = ParallelAttention.apply(measured, scheme, *inputs)[1]
        return dict(zip(unit.stats, values, strict=True))

    return check_policy_tensor(call, call.policy(torch.cat(counts, -1), Rows(call.queries, measure)))
