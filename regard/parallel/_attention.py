"""`regard.attention` on a sequence that is sharded over ranks: validate, agree, run the scheme, differentiate."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from regard import statistics
from regard._attention.call import Call
from regard._attention.run import check_asked
from regard._dtensor import is_dtensor
from regard.parallel import plain, ring, stationary, tree, visits
from regard.parallel.gradients import KeyGradients
from regard.parallel.layout import Spans, check, given_spans, joined, size, spans
from regard.parallel.line import Line
from regard.parallel.merge import Total
from regard.parallel.plan import Plan, choose
from regard.problem import Gradients, Problem, Upstream, Whole
from regard.statistics import DIFFERENTIABLE, Statistics
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
    group: dist.ProcessGroup | None = None,
    layout: str = "balanced",
    normalizer: str = "softmax",
    temperature=None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
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
    A rank that dies or stalls ends the call on every other rank with a `RankError` that names it.

    Args:
        q, k, v: this rank's pieces, cut by `regard.parallel.shard`.
        attn_mask: rows as q (cut by `shard(mask, dim=-2)`, or 1 row for all), columns of the whole sequence.
        temperature, sink: per query where they have as many rows as q, otherwise the same on every rank.
        window, key_lengths, is_causal: count positions of the whole sequence; key_lengths is the same on every rank.
        group: the ranks that share the sequence; None is all of them.
        layout: "balanced", or "contiguous", which takes pieces of any length, in the order of ranks.
        lengths: the whole (Lq, Lk), if known: the ranks then need not ask one another.

    All other arguments are those of `regard.attention`. Gradients of what every rank has the same of (a sink per head,
    a learned temperature, a mask without rows) are this rank's share: sum them over the group, as those of weights.
    """
    check(layout)
    arguments = (attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, sink, window,
                 key_lengths, return_stats)  # fmt: skip
    line = Line.of(group)
    queries, keys, flags, seed = _agree(line, layout, lengths, q, k, v, arguments)
    call = _call(q, k, v, arguments, sum(map(size, keys)), backend)
    plan = _plan(call, line, queries, keys, flags, backend)
    return _answer(plan, call, seed, _Sharded())


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
    group: dist.ProcessGroup | None = None,
    layout: str = "balanced",
    normalizer: str = "softmax",
    temperature=None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
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
    check(layout)
    arguments = (attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, sink, window,
                 key_lengths, return_stats)  # fmt: skip
    line = Line.of(group)
    whole = None if lengths is None else (q.shape[-2] * line.world, lengths)
    _, keys, flags, seed = _agree(line, layout, whole, q, k, v, arguments, shared=True)
    call = _call(q, k, v, arguments, sum(map(size, keys)), backend)
    everywhere = [[(0, q.shape[-2])]] * line.world
    plan = _plan(call, line, everywhere, keys, flags, backend)
    return _answer(plan, call, seed, _Shared())


def _agree(line: Line, layout, lengths, q, k, v, arguments, shared=False):
    """(spans of the queries, of the keys, (is the mask per row?), the seed): what all ranks must see alike."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or is_dtensor(x):
            raise TypeError(f"{name} must be a tensor, this rank's local piece, got {type(x).__name__}")
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions (length, width), got shape {tuple(x.shape)}")
    mask, dropout_p = arguments[0], arguments[1]
    seed = int(torch.randint(0, 2**62, (1,), device=q.device, dtype=torch.int64)) if dropout_p else 0
    rows = mask.shape[-2] if isinstance(mask, Tensor) and mask.ndim > 1 else 1
    if lengths is not None:
        queries, keys = (spans(length, line.world, layout) for length in lengths)
        if not shared and (q.shape[-2], k.shape[-2]) != (size(queries[line.rank]), size(keys[line.rank])):
            own = size(queries[line.rank]), size(keys[line.rank])
            came = q.shape[-2], k.shape[-2]
            raise ValueError(f"lengths {tuple(lengths)} give this rank {own} positions, but q and k have {came}")
        if not dropout_p and mask is None:
            return queries, keys, False, seed
    alike = {"with different options": [_kind(x) for x in (*arguments, layout)]}
    for name, x in (("q", q), ("k", k), ("v", v)):
        alike[f"with {name} of different dtypes"] = str(x.dtype)
        alike[f"with {name} of different shapes (all but the length)"] = (*x.shape[:-2], x.shape[-1])
    marks = [zlib.crc32(repr(x).encode()) for x in alike.values()]
    told = line.all_gather_numbers([q.shape[-2], k.shape[-2], rows, seed, *marks], "agree")
    for rank, (*_, others) in enumerate((*n[:4], n[4:]) for n in told):
        for how, other, first in zip(alike, others, told[0][4:], strict=True):
            if other != first:
                raise ValueError(f"rank {rank} and rank 0 call {how}; every rank must pass the same")
    if lengths is None:
        queries = given_spans([n for n, *_ in told], "contiguous" if shared else layout, "q")
        keys = given_spans([n for _, n, *_ in told], layout, "k")
    per_row = any(n[2] != 1 for n in told) or all(n[0] == 1 for n in told)
    return queries, keys, per_row, told[0][3]


def _kind(x):
    """What of an argument must be the same on every rank: a tensor's dtype and dims, a policy's numbers, or itself."""
    if isinstance(x, Tensor):
        return str(x.dtype), x.ndim
    if not callable(x):
        return x
    plain = {
        name: value for name, value in getattr(x, "__dict__", {}).items() if isinstance(value, (int, float, str, tuple))
    }
    learned = []
    if isinstance(x, torch.nn.Module):
        learned = [p.detach().double().flatten().tolist() for p in (*x.parameters(), *x.buffers())]
    return type(x).__name__, sorted(plain.items()), learned


def _call(q, k, v, arguments, keys: int, backend) -> Call:
    """The arguments checked as those of a whole call, whose keys need not be there for that."""

    def longer(x):
        return x.new_empty(()).expand(*x.shape[:-2], keys, x.shape[-1]) if isinstance(x, Tensor) and x.ndim > 1 else x

    if isinstance(k, Tensor) and isinstance(v, Tensor) and k.shape[-2:-1] != v.shape[-2:-1]:
        raise ValueError(f"k and v must have the same length, got {k.shape[-2]} and {v.shape[-2]}")
    mask, dropout_p, is_causal, scale, gqa, normalizer, temperature, softcap, sink, window, lengths, stats = arguments
    shown = backend if backend != "torch" else None
    call = Call.of(q, longer(k), longer(v), mask, dropout_p, is_causal, scale, gqa, normalizer, temperature, softcap,
                    sink, window, lengths, stats, shown)  # fmt: skip
    batch, groups = call.problem.k.shape[:2]
    lead = (*call.lead[:-1], groups) if call.lead else ()
    wide = call.problem.q.dtype
    own_k, own_v = (x.to(wide).expand(*lead, *x.shape[-2:]).reshape(batch, groups, *x.shape[-2:]) for x in (k, v))
    call.problem = replace(call.problem, k=own_k, v=own_v)
    return call


def _plan(call: Call, line: Line, queries: list[Spans], keys: list[Spans], per_row: bool, backend) -> Plan:
    engine = choose(call.problem, backend)
    problem = call.problem
    if engine is plain and problem.q.device.type == "cpu":  # as `regard.attention` does it where no kernel is
        problem = replace(problem, q=problem.q.double(), k=problem.k.double(), v=problem.v.double())
    if _anywhere(problem):  # whole pieces at a time, as if they lay one after another
        queries, keys = (given_spans([size(own) for own in cut], "contiguous", "") for cut in (queries, keys))
    queries, keys = ([joined(own) for own in cut] for cut in (queries, keys))
    plan = Plan(problem, line, queries, keys, engine, call.bias, call.mask)
    plan.bias_per_row = plan.mask_per_row = per_row
    return plan


def _anywhere(problem: Problem) -> bool:
    """Does nothing depend on where a query or a key stands?"""
    dense = (problem.bias, problem.mask, problem.key_lengths)
    counted = {"distance", "first_key_mass"} & set(problem.stats)
    return problem.reach == (None, None) and all(x is None for x in dense) and not problem.dropout_p and not counted


def _answer(plan: Plan, call: Call, seed: int, scheme):
    problem = plan.problem
    if problem.dropout_p:
        problem.seed = torch.tensor([seed], device=problem.q.device)
    temperature = call.temperature
    if call.policy is not None:
        temperature = _ask(plan, call, scheme)
        problem = replace(problem, temperature=temperature.expand(problem.q.shape[:3]))
        plan = replace(plan, problem=problem)
    names = problem.stats
    carries = problem.choice.family == "ratio" and problem.choice.exponential
    names = _with_helpers(problem, names)
    plan.problem = replace(plan.problem, stats=names)
    given = plan.problem.q, plan.problem.k, plan.problem.v, call.bias, temperature, call.sink
    out, values = _Apply.apply(plan, scheme, *given)
    out = out.reshape(*call.lead, *out.shape[-2:]).to(call.problem.q.dtype)
    if not call.wanted:
        return out
    found = dict(zip(names, values.to(call.problem.accumulator), strict=True))
    kept = DIFFERENTIABLE if carries else ()
    shaped = {n: found[n].reshape(out.shape[:-1]) for n in call.wanted}
    return out, Statistics({n: x if n in kept else x.detach() for n, x in shaped.items()})


def _ask(plan: Plan, call: Call, scheme) -> Tensor:
    """The temperature that a policy gives for this rank's rows."""
    problem, own = plan.problem, scheme.spans(plan)
    batch, groups, _, d = problem.k.shape
    whole = replace(problem, k=problem.k.new_empty(()).expand(batch, groups, plan.total_keys, d))
    counts = [visible_keys(rows) for _, rows in plan.rows(whole, own)]

    def measure(names):
        plain = replace(problem, stats=_with_helpers(problem, statistics.resolve(names)), dropout_p=0.0)
        given = problem.q, problem.k, problem.v, call.bias, None, call.sink
        values = _Apply.apply(replace(plan, problem=plain), scheme, *given)[1]
        return dict(zip(plain.stats, values, strict=True))

    return check_asked(call.policy(torch.cat(counts, -1), Rows(problem.q, measure)), call)


def _with_helpers(problem: Problem, names: tuple[str, ...]) -> tuple[str, ...]:
    """With the statistics that the gradients of these take."""
    carries = problem.choice.family == "ratio" and problem.choice.exponential
    if torch.is_grad_enabled() and carries and set(names) & set(DIFFERENTIABLE):
        return statistics.resolve((*names, "visible_keys", "mean_logit", "logsumexp", "mass", "entropy"))
    return names


class _Sharded:
    """Every rank has its own queries: a ring, or visits for threshold maps."""

    @staticmethod
    def spans(plan: Plan) -> Spans:
        return plan.queries[plan.line.rank]

    @staticmethod
    def forward(plan: Plan) -> tuple[list[Total], Tensor | None]:
        if plan.problem.choice.family != "threshold":
            return ring.forward(plan), None
        totals, _, c = visits.forward(plan)
        return totals, c

    @staticmethod
    def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
        scheme = visits if plan.problem.choice.family == "threshold" else ring
        return scheme.backward(plan, whole, upstream)


class _Shared:
    """Every rank has all queries: its keys' parts, merged by a tree."""

    @staticmethod
    def spans(plan: Plan) -> Spans:
        return plan.queries[0]

    @staticmethod
    def forward(plan: Plan) -> tuple[list[Total], Tensor | None]:
        totals, _, c = stationary.parts(plan, _Shared._rows(plan), plan.queries[0])
        return [tree.all_merge(plan.line, total) for total in totals], c

    @staticmethod
    def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
        rows, keys = _Shared._rows(plan), KeyGradients(plan.problem)
        dq, heat, columns = stationary.backward(plan, rows, plan.queries[0], whole, upstream, keys)
        dq = plan.line.all_reduce(dq, "tree backward")
        heat = None if heat is None else plan.line.all_reduce(heat, "tree backward")
        bias = None
        if columns is not None:
            bias = torch.zeros((*columns.shape[:3], plan.bias.shape[3]), dtype=dq.dtype, device=dq.device)
            visits.place(plan, bias, columns, plan.line.rank)
            bias = plan.line.all_reduce(bias, "tree backward")
        return Gradients(dq, keys.k, keys.v, bias, heat)

    @staticmethod
    def _rows(plan: Plan):
        full = (*plan.problem.q.shape[:3], plan.problem.k.shape[2])
        dense = {
            name: None if (x := getattr(plan, name)) is None else plan.columns(x, plan.line.rank).expand(full)
            for name in ("bias", "mask")
        }
        return replace(plan.problem, sink=None, **dense)


class _Apply(torch.autograd.Function):
    """(o, statistics [S, B, H, M]) and their gradients."""

    @staticmethod
    def forward(ctx, plan: Plan, scheme, q, k, v, bias, temperature, sink):
        plan = _detached(plan)
        problem = plan.problem
        totals, c = scheme.forward(plan)
        chunks = list(plan.rows(problem, scheme.spans(plan)))
        done = [total.finish(rows) for total, (_, rows) in zip(totals, chunks, strict=True)]
        o, m, z = (torch.cat(parts, 2) for parts in zip(*done, strict=True))
        values = m.new_empty((len(problem.stats), *m.shape))
        for total, (here, rows) in zip(totals, chunks, strict=True):
            if problem.stats:
                found = total.statistics(rows, m[:, :, here], z[:, :, here])
                for name, row in zip(problem.stats, values, strict=True):
                    row[:, :, here] = found[name]
        ctx.plan, ctx.scheme = plan, scheme
        out = o.to(problem.q.dtype)
        ctx.save_for_backward(out, m, z, c, values, bias, temperature, sink)
        ctx.set_materialize_grads(False)
        return out, values

    @staticmethod
    def backward(ctx, do, dvalues):
        plan, problem = ctx.plan, ctx.plan.problem
        o, m, z, c, values, bias, temperature, sink = ctx.saved_tensors
        needs = ctx.needs_input_grad
        do = torch.zeros_like(o) if do is None else do
        delta = (do.to(m.dtype) * o.to(m.dtype)).sum(-1)
        whole = Whole(m, z, delta, c, _tilt(problem, m, z, values, dvalues), o)
        whole.values = dict(zip(problem.stats, values, strict=True))
        upstream = Upstream(do, _pulls(problem, dvalues), bias=needs[5], temperature=needs[6])
        grads = ctx.scheme.backward(plan, whole, upstream)
        dsink = None
        if needs[7]:
            share = torch.where(z == 0, 0.0, torch.exp(problem.sink.to(m.dtype) - m) / z)
            pull = 0.0
            if dvalues is not None and "logsumexp" in problem.stats:
                pull = dvalues[problem.stats.index("logsumexp")]
            dsink = (share * (pull - delta)).sum_to_size(sink.shape).to(sink.dtype)
        extras = [
            grads.bias.sum_to_size(bias.shape).to(bias.dtype) if needs[5] else None,
            grads.temperature.sum_to_size(temperature.shape).to(temperature.dtype) if needs[6] else None,
        ]
        main = (x.to(problem.q.dtype) for x in (grads.q, grads.k, grads.v))
        return (None, None, *main, *extras, dsink)


def _pulls(problem: Problem, dvalues: Tensor | None) -> dict[str, Tensor]:
    """The gradients of the statistics that have one."""
    if dvalues is None or not (problem.choice.family == "ratio" and problem.choice.exponential):
        return {}
    return {name: x for name, x in zip(problem.stats, dvalues, strict=True) if name in DIFFERENTIABLE}


def _tilt(problem, m, z, values, dvalues) -> Tensor | None:
    """What the statistics' gradients add to ds: (lift, β, γ, mean) of `Whole`."""
    if dvalues is None or not (problem.choice.family == "ratio" and problem.choice.exponential):
        return None
    zero = torch.zeros_like(m)
    stats, pulls = (dict(zip(problem.stats, x, strict=True)) for x in (values, dvalues))
    lift = pulls.get("logsumexp", zero)
    beta, gamma, mean = zero, zero, zero
    if "entropy" in pulls:
        mass = stats["mass"]
        alive = (mass > 0) & (z > 0)
        beta = torch.where(alive, pulls["entropy"] / mass.where(alive, 1.0), 0.0)
        lift = lift - beta * (stats["entropy"] - torch.log((z * mass).where(alive, 1.0)))
    if "logit_variance" in pulls:
        n, mean = stats["visible_keys"], stats["mean_logit"]
        gamma = 2.0 * pulls["logit_variance"] / n.clamp_min(1.0)
    return torch.stack([lift, beta, gamma, mean])


def _detached(plan: Plan) -> Plan:
    names = ("q", "k", "v", "bias", "mask", "temperature", "sink")
    problem = plan.problem
    given = {name: getattr(problem, name) for name in names}
    problem = replace(problem, **{name: x.detach() for name, x in given.items() if x is not None})
    bias = None if plan.bias is None else plan.bias.detach()
    return replace(plan, problem=problem, bias=bias)
