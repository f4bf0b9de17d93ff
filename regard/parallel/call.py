"""A call on pieces before anything is computed: each rank checks its own, all agree, and the work is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._core.dtensor import is_dtensor
from regard._core.options import AttentionOptions
from regard._core.prepare import Call, prepare
from regard._core.validation import repeat_heads
from regard.parallel import partial as plain
from regard.parallel.group import Line
from regard.parallel.handshake import agree, alike_sketches, kind, sketch
from regard.parallel.layout import Spans, check, given_spans, joined, size
from regard.parallel.plan import Plan, choose


@dataclass
class Given:
    """The arguments of `regard.parallel.attention`, or of `decode` (shared: every rank has the same q)."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict  # those of regard.attention
    layout: str
    lengths: Any
    backend: str | None
    shared: bool = False

    def planned(self, line: Line) -> tuple[Plan, Call, int]:
        """(the plan, the call, the seed of dropout), once every rank has told that it calls alike."""
        call: Any = None
        failure: Exception | None = None
        numbers: list[int] = []
        alike: dict[str, object] = {}
        try:
            call = self._checked(self._guess(line.world))
            choose(call.problem, self.backend)
            numbers, alike = self._told(call)
        except Exception as error:
            failure = error
        told = agree(line, "decode" if self.shared else "attention", numbers, alike, failure)
        queries, keys = self._spans(told)
        total = sum(map(size, keys))
        if total != call.problem.k.shape[2]:
            call = self._checked(total)
        call = self._with_own_keys(call)
        per_row = any(n[2] != 1 for n in told) or all(n[0] == 1 for n in told)
        plan = _plan(call, line, queries, keys, per_row, self.backend)
        plan.pulls = self._pulls(call)
        return plan, call, told[0][5]

    def _guess(self, world: int) -> int:
        """How many keys all ranks have together: by what came with them, else as many as if each had the same."""
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or is_dtensor(x):
                raise TypeError(f"{name} must be a tensor, this rank's local piece, got {type(x).__name__}")
            if x.ndim < 2:
                raise ValueError(f"{name} must have at least 2 dims (…, length, head_dim), got shape {tuple(x.shape)}")
        check(self.layout)
        wanted = "the whole number of keys, an int" if self.shared else "the whole (Lq, Lk), two ints"
        numbers = (self.lengths,) if self.shared else self.lengths
        two = isinstance(numbers, (tuple, list)) and len(numbers) == (1 if self.shared else 2)
        if self.lengths is not None and not (two and all(isinstance(n, int) and n >= 0 for n in numbers)):
            raise ValueError(f"lengths must be {wanted}, got {self.lengths!r}")
        if self.k.shape[-2] != self.v.shape[-2]:
            raise ValueError(f"k and v must have the same length, got {self.k.shape[-2]} and {self.v.shape[-2]}")
        if (columns := self._mask_size(-1)) != 1:
            return columns
        lengths = self.options["key_lengths"]
        longest = 0 if lengths is None else max(torch.as_tensor(lengths).flatten().tolist(), default=0)
        return max(self.k.shape[-2] * world, int(longest))

    def _checked(self, keys: int) -> Call:
        """The arguments checked as those of a whole call, whose keys need not be there for that."""
        backend = self.backend if self.backend != "torch" else None
        k, v = (x.new_empty(()).expand(*x.shape[:-2], keys, x.shape[-1]) for x in self._own_keys())
        return prepare(self.q, k, v, AttentionOptions(**self.options, backend=backend))

    def _own_keys(self) -> tuple[Tensor, Tensor]:
        k, v = self.k, self.v
        if self.options["enable_gqa"] is True and min(k.ndim, v.ndim) > 2 and k.shape[-3] != v.shape[-3]:
            k, v = repeat_heads(k, "k", self.q), repeat_heads(v, "v", self.q)
        return k, v

    def _with_own_keys(self, call: Call) -> Call:
        batch, groups = call.problem.k.shape[:2]
        lead = (*call.lead[:-1], groups) if call.lead else ()
        own = (x.to(call.problem.q.dtype).expand(*lead, *x.shape[-2:]) for x in self._own_keys())
        k, v = (x.reshape(batch, groups, *x.shape[-2:]) for x in own)
        return replace(call, problem=replace(call.problem, k=k, v=v))

    def _mask_size(self, dim: int) -> int:
        mask = self.options["attn_mask"]
        return mask.shape[dim] if isinstance(mask, Tensor) and mask.ndim >= -dim else 1

    def _told(self, call: Call) -> tuple[list[int], dict[str, object]]:
        """(lengths and the like, what must be the same on every rank)."""
        problem = call.problem
        lengths = [] if problem.key_lengths is None else problem.key_lengths.tolist()
        seed = int(torch.randint(0, 2**62, (1,), device=self.q.device)) if problem.dropout_p else 0
        numbers = [self.q.shape[-2], self.k.shape[-2], self._mask_size(-2), self._mask_size(-1)]
        numbers += [max(lengths, default=0), seed, *(sketch(self.q) if self.shared else [])]
        options = {name: x for name, x in self.options.items() if name != "key_lengths"}
        options |= dict(layout=self.layout, lengths=self.lengths, backend=self.backend)
        alike: dict[str, object] = {f"with different {name}": kind(x) for name, x in options.items()}
        alike["with different key_lengths"] = lengths
        alike["with and without gradients"] = self._pulls(call)
        for name, x in dict(attn_mask=call.bias, temperature=call.temperature).items():  # theirs travel
            pulled = torch.is_grad_enabled() and x is not None and x.requires_grad
            alike[f"with and without a gradient of {name}"] = pulled
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            alike[f"with {name} of different dtypes"] = str(x.dtype)
            if self.shared and name == "q":
                alike["with q of different shapes"] = tuple(x.shape)
            else:
                alike[f"with {name} of different shapes (all but the length)"] = (*x.shape[:-2], x.shape[-1])
        return numbers, alike

    def _pulls(self, call: Call) -> bool:
        learned = (self.q, self.k, self.v, call.problem.q, call.bias, call.temperature, call.sink)
        policy = call.policy.parameters() if isinstance(call.policy, torch.nn.Module) else ()
        wanted = any(x is not None and x.requires_grad for x in (*learned, *policy))
        return torch.is_grad_enabled() and wanted

    def _spans(self, told: list[list[int]]) -> tuple[list[Spans], list[Spans]]:
        """The positions of every rank's queries and keys; what does not fit together is raised on every rank alike."""
        lengths = [n[0] for n in told], [n[1] for n in told]
        if self.shared:
            queries = [[(0, lengths[0][0])] for _ in told]
            for rank, (*_, a, b, c, d) in enumerate(told):
                if not alike_sketches(told[0][-4:], (a, b, c, d)):
                    raise ValueError(f"rank {rank} and rank 0 call with different q; decode takes the same on all")
        else:
            queries = given_spans(lengths[0], self.layout, "q")
        keys = given_spans(lengths[1], self.layout, "k")
        total = sum(lengths[1])
        came = total if self.shared else (sum(lengths[0]), total)
        if self.lengths is not None and came != (self.lengths if self.shared else tuple(self.lengths)):
            raise ValueError(f"lengths are {self.lengths}, but the pieces of all ranks together have {came} positions")
        for rank, (_, _, _, columns, longest, *_) in enumerate(told):
            if columns not in (1, total):
                raise ValueError(
                    f"attn_mask of rank {rank} has {columns} columns, but all ranks together have {total} keys; "
                    "cut its rows alone: shard(mask, dim=-2)"
                )
            if longest > total:
                raise ValueError(f"key_lengths must lie in [0, {total}], got {longest}")
        return queries, keys


def _plan(call: Call, line: Line, queries: list[Spans], keys: list[Spans], per_row: bool, backend) -> Plan:
    engine = choose(call.problem, backend)
    problem = call.problem
    if engine is plain and problem.q.device.type == "cpu":  # as `regard.attention` does it where no kernel is;
        problem = replace(problem, q=problem.q.double())  # k and v travel as they came
    dense = dict(bias=call.bias, mask=call.mask)
    if per_row and problem.choice.family == "threshold":  # every row travels, also where all are views of one
        for name, x in dense.items():
            if x is not None and x.shape[2] != problem.q.shape[2]:
                dense[name] = x = x.expand(-1, -1, problem.q.shape[2], -1).contiguous()
                problem = replace(problem, **{name: x.expand(getattr(problem, name).shape)})
    order = _order(call)
    if order == (None, None):  # whole pieces at a time, as if they lay one after another
        queries, keys = (given_spans([size(own) for own in cut], "contiguous", "") for cut in (queries, keys))
    queries, keys = ([joined(own) for own in cut] for cut in (queries, keys))
    plan = Plan(problem, line, queries, keys, engine, **dense)
    plan.bias_per_row = plan.mask_per_row = per_row
    plan.ordered = order == (None, 0)
    return plan


def _order(call: Call) -> tuple[int | None, int | None] | None:
    """The reach, if nothing else depends on where a query or a key stands (a policy may measure what does)."""
    problem = call.problem
    others = (problem.bias, problem.mask, problem.key_lengths, call.policy)
    counted = {"distance", "first_key_mass"} & set(problem.stats)
    return problem.reach if all(x is None for x in others) and not problem.dropout_p and not counted else None
