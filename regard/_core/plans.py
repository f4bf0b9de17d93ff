"""Plans: a call whose kind was seen before goes from one dictionary look-up to its kernel.

Checking sixteen arguments and choosing a path costs more than a small kernel runs. All of it follows from the options
and from what `call_key` takes of q, k and v, so that its result is kept under that key; the first call runs the plan
that it makes. Lengths are no part of the key where nothing but their class decides, so that a growing cache keeps its
plan; what follows from exact lengths (blocks, tapes) is kept by the backends, one level below. Only calls without
tensors of the user's among their options have plans, and only where nothing records or rewrites calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import ModuleType

import torch
from torch import Tensor

from regard import normalizers, statistics
from regard._call.arguments import AttentionOptions, key_of
from regard._call.problem import MARKS, TENSORS, Problem
from regard._core.cudnn_forward import choose_attention
from regard._core.derivatives.autograd import FusedAttention, differentiable_twice
from regard._core.derivatives.transforms import Duals, Setting, split_duals
from regard._core.dispatch import classify_lengths, has_transform, why_not_carried
from regard._core.ops.backends import ATTENTION, backend_module
from regard._core.prepare import PreparedCall
from regard._facts import allowed_backends, remember
from regard.statistics import Statistics

Plan = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Statistics]]
MAX_PLANS, MAX_INTERVALS = 1024, 16
plans: dict[Hashable, Plan] = {}
settings: dict[Hashable, Setting] = {}  # of calls in forward mode
with_interval: dict[Hashable, None] = {}  # keys of plans that hold an interval per query, the oldest first
after_tensors = attrgetter(*list(MARKS)[3:])  # the fields of a problem after q, k and v


def call_key(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Hashable | None:
    """Return the key of the plan of a call in plain eager mode; None for a call that has no plan."""
    if not (type(q) is type(k) is type(v) is Tensor and q.layout is k.layout is v.layout is torch.strided):
        return None
    device, given = q.device, key_of(options)
    if given is None or not (q.dtype is k.dtype is v.dtype and device == k.device == v.device):
        return None
    (*lead, queries, width), (*kv_lead, keys, _), sizes = q.shape, k.shape, v.shape
    if len(sizes) < 2 or sizes[-2] != keys or k.shape[-1] != width or not (queries and keys):
        return None
    autocast = torch.is_autocast_enabled(device.type) if device.type in ("cpu", "cuda") else None
    if autocast is None or (autocast and q.dtype != torch.get_autocast_dtype(device.type)):
        return None
    lengths: Hashable = queries > keys, queries < keys
    modes: Hashable = torch.are_deterministic_algorithms_enabled(), autocast, normalizers.generation()
    if options.attn_mask is not None or options.gate is not None:
        lengths = queries, keys
    if q.is_cuda:
        modes = modes, allowed_backends(), *[x.is_contiguous() or x.stride() for x in (q, k, v)]
        lengths = lengths, classify_lengths(q.shape, keys)
    return given, tuple(lead), width, tuple(kv_lead), sizes[:-2], sizes[-1], lengths, q.dtype, device, modes


def keep_plan(key: Hashable, plan: Plan, call: PreparedCall) -> None:
    """Keep a plan for calls like this one."""
    remember(plans, key, plan, MAX_PLANS)
    if call.problem.interval is not None:  # which takes memory, and a step of packed batches brings new ones
        while len(with_interval) >= MAX_INTERVALS:
            oldest = next(iter(with_interval))
            with_interval.pop(oldest, None), plans.pop(oldest, None)
        with_interval[key] = None


def make_plan(call: PreparedCall) -> Plan | None:
    """The plan of a call whose tensors are used as they came; None where something would have to be done to them."""
    problem = call.problem
    if not takes_plain_tensors(call):
        return None
    if call.path.backend == "torch":
        cut = problem.causal and problem.k.shape[2] > problem.q.shape[2]
        return None if cut or call.wanted is not None else _torch_plan(problem)
    if call.path.backend in ("cpu", "triton") and (problem.choice.merges or not problem.stats):
        module = backend_module(ATTENTION, call.path.backend)
        options = replace(problem.without_tensors(), kind=object(), interval=problem.interval)
        return partial(_run_fused, options, after_tensors(options), module, call.wanted)
    return None


def takes_plain_tensors(call: PreparedCall) -> bool:
    """True if q, k and v are used as they came, none is empty, and no other tensor is read."""
    problem = call.problem
    others = call.policy, call.row_shift, *(getattr(problem, name) for name in TENSORS[3:] if name != "interval")
    if not call.is_as_given or any(x is not None for x in others) or problem.dropout_p:
        return False
    return problem.q.numel() > 0 and problem.v.numel() > 0


def plan_duals(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Duals, Hashable] | None:
    """Return q, k and v under one level of forward mode taken apart, and the key of their plan; None without either."""
    stacks = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    if stacks or options.gate is not None:
        return None
    duals = split_duals((q, k, v))
    if duals is None or all(x is None for x in duals.tangents):
        return None
    q, k, v = duals.primals
    with duals.outside():
        key = call_key(q, k, v, options)
    return None if key is None else (duals, key)


def keep_setting(key: Hashable, call: PreparedCall) -> None:
    """Keep how a call in forward mode is computed, if its tensors are used as they came."""
    problem = call.problem
    others = call.policy, call.wanted, *call.inputs[3:]
    carried = call.path.backend in ("cpu", "triton") and has_transform(problem) and why_not_carried(problem) is None
    whole = not problem.dropout_p and problem.v.numel()
    if call.is_as_given and carried and whole and all(x is None for x in others):
        remember(settings, key, Setting(problem.without_tensors(), call.path.backend, (0, 1, 2)), MAX_PLANS)


def _torch_plan(problem: Problem) -> Plan:
    attend, plain = choose_attention(problem)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        return differentiable_twice(out, (q, k, v), plain) if out.requires_grad else out

    return run


def _run_fused(
    options: Problem, rest: tuple, module: ModuleType, wanted: tuple[str, ...] | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor | tuple[Tensor, Statistics]:
    order = options.stats
    problem = Problem(q, k, v, *rest)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        problem.stats = order = statistics.with_gradient_inputs(order, options.choice)
        given = (options.interval if name == "interval" else None for name in TENSORS[3:])
        out, stacked = FusedAttention.apply(problem, module, q, k, v, *given)
    else:
        out, stacked = module.attend(problem)
    if wanted is None:
        return out
    return out, Statistics.of_stacked(stacked, order, wanted, options.choice)
