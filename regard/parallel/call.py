"""`ShardedCall`: the arguments of a call on shards, checked, compared between ranks and turned into a `ShardPlan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._call.arguments import AttentionOptions
from regard._call.mask.attn_mask import split_attn_mask
from regard._call.mask.mask import Mask
from regard._call.mask.visible import Visible, resolve_mask
from regard._core.dispatch import find_on_request
from regard._core.dtensor import is_dtensor
from regard._core.prepare import PreparedCall, prepare
from regard.parallel.group import RankGroup
from regard.parallel.handshake import compare_calls, sketch, sketches_match, summarize
from regard.parallel.layout import Spans, check_layout, count_positions, merge_spans, spans_of_lengths
from regard.parallel.plan import ShardPlan, choose_engine


@dataclass
class ShardedCall:
    """The arguments of `regard.parallel.attention`, or of `decode` (shared: every rank has the same q)."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: AttentionOptions
    layout: str
    shared: bool = False
    mask: Mask | None = None  # sized by the whole sequence, after the handshake

    def make_plan(self, group: RankGroup) -> tuple[ShardPlan, PreparedCall, int]:
        """Return (the plan, the call, the seed of dropout) after the handshake."""
        call: Any = None
        failure: Exception | None = None
        numbers: list[int] = []
        alike: dict[str, object] = {}
        try:
            self._split_mask()
            call = self._validate(self._estimate_keys(group.world))
            choose_engine(call.problem, self.options.backend)
            numbers, alike = self._describe(call)
        except Exception as error:
            failure = error
        answers = compare_calls(group, "decode" if self.shared else "attention", numbers, alike, failure)
        queries, keys = self._spans(answers)
        total = sum(map(count_positions, keys))
        if total != call.problem.k.shape[2]:
            call = self._validate(total)
        call = self._with_own_keys(call)
        interval = None
        if self.mask is not None:
            spans = queries[0] if self.shared else [span for own in queries for span in own]
            call, interval = self._with_mask(call, count_positions(spans), total)
        plan = _plan(call, group, queries, keys, self.options.backend, interval)
        return plan, call, answers[0][4]

    def _split_mask(self) -> None:
        """Take a `regard.Mask` out of the options; a bias of `regard.bias` is refused."""
        given = split_attn_mask(self.options.attn_mask, self.options.is_causal, getattr(self.q, "device", None))
        if given.bias is not None:
            raise TypeError("attn_mask: regard.parallel takes no bias of regard.bias; pass it as a dense tensor")
        if len(given.tensors) > 1:
            raise TypeError("attn_mask: regard.parallel takes one tensor beside a regard.Mask, got two")
        tensor = given.tensors[0] if given.tensors else None
        self.mask, self.options = given.mask, self.options._replace(attn_mask=tensor, is_causal=given.is_causal)

    def _with_mask(self, call: PreparedCall, queries: int, keys: int) -> tuple[PreparedCall, Tensor | None]:
        """Return the call narrowed by the mask of the whole sequence, and the interval of all queries."""
        assert self.mask is not None
        problem = call.problem
        counts_distance = "distance" in problem.stats or call.policy is not None
        lengths = () if problem.key_lengths is None else (problem.key_lengths,)
        beside = Visible(problem.causal, lengths=lengths).with_window(problem.left, problem.right, keys)
        visible, key_lengths = resolve_mask(self.mask, beside, problem.q, queries, keys, counts_distance)
        problem = replace(
            problem, causal=visible.causal, left=visible.left, right=visible.right, key_lengths=key_lengths
        )
        whole = visible.interval
        whole = None if whole is None else whole.expand(3, *problem.q.shape[:2], queries)
        return replace(call, problem=problem), whole

    def _estimate_keys(self, world: int) -> int:
        """Estimate the keys of all ranks together: from the mask or key_lengths, else as for equal shards."""
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or is_dtensor(x):
                raise TypeError(f"{name} must be a tensor, this rank's shard, got {type(x).__name__}")
            if x.ndim < 2:
                raise ValueError(f"{name} must have at least 2 dims (…, length, head_dim), got shape {tuple(x.shape)}")
        check_layout(self.layout)
        if self.k.shape[-2] != self.v.shape[-2]:
            raise ValueError(f"k and v must have the same length, got {self.k.shape[-2]} and {self.v.shape[-2]}")
        if (columns := self._mask_columns()) != 1:
            return columns
        lengths = self.options.key_lengths
        longest = 0 if lengths is None else max(torch.as_tensor(lengths).flatten().tolist(), default=0)
        return max(self.k.shape[-2] * world, int(longest))

    def _validate(self, keys: int) -> PreparedCall:
        """Return the arguments as a `PreparedCall` on the whole sequence, with placeholders of `keys` keys."""
        backend = self.options.backend if self.options.backend != "torch" else None
        k, v = (x.new_empty(()).expand(*x.shape[:-2], keys, x.shape[-1]) for x in (self.k, self.v))
        call = prepare(self.q, k, v, self.options._replace(backend=backend))
        if on_request := find_on_request(call.problem):
            raise ValueError(f"return_stats: {on_request!r} is not computed over ranks; ask regard.attention for it")
        if call.problem.score is not None:
            raise ValueError(
                "score_mod: regard.parallel takes soft_cap alone; pass what depends on i and j as attn_mask"
            )
        if (
            self.shared
            and torch.is_grad_enabled()
            and call.problem.bias is not None
            and call.problem.bias.requires_grad
        ):
            raise ValueError("attn_mask: regard.parallel.decode has no gradient of a bias; pass attn_mask.detach()")
        return call

    def _with_own_keys(self, call: PreparedCall) -> PreparedCall:
        batch, groups = call.problem.k.shape[:2]
        lead = (*call.lead[:-1], groups) if call.lead else ()
        own = (x.to(call.problem.q.dtype).expand(*lead, *x.shape[-2:]) for x in (self.k, self.v))
        k, v = (x.reshape(batch, groups, *x.shape[-2:]) for x in own)
        return replace(call, problem=replace(call.problem, k=k, v=v))

    def _mask_columns(self) -> int:
        mask = self.options.attn_mask
        return mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim else 1

    def _describe(self, call: PreparedCall) -> tuple[list[int], dict[str, object]]:
        """Return (lengths and other numbers of this rank, what must be the same on every rank)."""
        problem = call.problem
        lengths = [] if problem.key_lengths is None else problem.key_lengths.tolist()
        seed = int(torch.randint(0, 2**62, (1,), device=self.q.device)) if problem.dropout_p else 0
        numbers = [self.q.shape[-2], self.k.shape[-2], self._mask_columns(), max(lengths, default=0), seed]
        numbers += sketch(self.q) if self.shared else []
        options = self.options._replace(key_lengths=None)._asdict() | dict(layout=self.layout)
        options["attn_mask"] = options["attn_mask"] if self.mask is None else (options["attn_mask"], self.mask)
        alike: dict[str, object] = {f"with different {name}": summarize(x) for name, x in options.items()}
        alike["with different key_lengths"] = lengths
        alike["with and without gradients"] = self._wants_gradients(call)
        temperature = call.given["temperature"]  # its gradient is sent between ranks
        is_learned = torch.is_grad_enabled() and temperature is not None and temperature.requires_grad
        alike["with and without a gradient of temperature"] = is_learned
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            alike[f"with {name} of different dtypes"] = str(x.dtype)
            if self.shared and name == "q":
                alike["with q of different shapes"] = tuple(x.shape)
            else:
                alike[f"with {name} of different shapes (all but the length)"] = (*x.shape[:-2], x.shape[-1])
        return numbers, alike

    def _wants_gradients(self, call: PreparedCall) -> bool:
        learned = (
            self.q,
            self.k,
            self.v,
            call.problem.q,
            *(call.given[name] for name in ("bias", "temperature", "sink")),
        )
        policy = call.policy.parameters() if isinstance(call.policy, torch.nn.Module) else ()
        wanted = any(x is not None and x.requires_grad for x in (*learned, *policy))
        return torch.is_grad_enabled() and wanted

    def _spans(self, answers: list[list[int]]) -> tuple[list[Spans], list[Spans]]:
        """Return the positions of every rank's queries and keys; raise alike on every rank if they do not fit."""
        lengths = [n[0] for n in answers], [n[1] for n in answers]
        if self.shared:
            queries = [[(0, lengths[0][0])] for _ in answers]
            for rank, (*_, a, b, c, d) in enumerate(answers):
                if not sketches_match(answers[0][-4:], (a, b, c, d)):
                    raise ValueError(f"rank {rank} and rank 0 call with different q; decode takes the same on all")
        else:
            queries = spans_of_lengths(lengths[0], self.layout, "q")
        keys = spans_of_lengths(lengths[1], self.layout, "k")
        total = sum(lengths[1])
        for rank, (_, _, columns, longest, *_) in enumerate(answers):
            if columns not in (1, total):
                raise ValueError(
                    f"attn_mask of rank {rank} has {columns} columns, but all ranks together have {total} keys; "
                    "cut its rows alone: shard(mask, dim=-2)"
                )
            if longest > total:
                raise ValueError(f"key_lengths must lie in [0, {total}], got {longest}")
        return queries, keys


def _plan(
    call: PreparedCall,
    group: RankGroup,
    queries: list[Spans],
    keys: list[Spans],
    backend: str | None,
    interval: Tensor | None,
) -> ShardPlan:
    problem = call.problem
    engine, kernels = choose_engine(problem, backend)
    reach = _reach_if_alone(call) if interval is None else None
    if reach == (None, None):  # positions do not matter: treat shards as contiguous
        queries, keys = (
            spans_of_lengths([count_positions(own) for own in cut], "contiguous", "") for cut in (queries, keys)
        )
    queries, keys = ([merge_spans(own) for own in cut] for cut in (queries, keys))
    plan = ShardPlan(problem, group, queries, keys, engine, kernels, call.given["bias"], call.given["mask"], interval)
    plan.problem = replace(problem, interval=plan.interval_of(group.rank))
    plan.causal_only = reach == (None, 0)
    return plan


def _reach_if_alone(call: PreparedCall) -> tuple[int | None, int | None] | None:
    """Return the problem's reach, or None if anything else depends on positions (a policy may measure it)."""
    problem = call.problem
    others = (problem.bias, problem.mask, problem.key_lengths, call.policy)
    counted = {"distance", "first_key_mass"} & set(problem.stats)
    return problem.reach if all(x is None for x in others) and not problem.dropout_p and not counted else None
