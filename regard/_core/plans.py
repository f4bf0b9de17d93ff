"""Plans: a call whose kind was seen before goes from one dictionary look-up to its kernel.

Checking sixteen arguments and choosing a path costs more than a small kernel runs. All of it follows from the options
and from the shapes, dtypes and device of q, k and v, so that its result is kept under these as a key. Only calls
without tensors of the user's among their options are kept, and only where nothing records or rewrites calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from regard import normalizers, statistics
from regard._core.cudnn_forward import plan_attention
from regard._core.derivatives.autograd import FusedAttention, differentiable_twice
from regard._core.derivatives.transforms import Duals, Setting, split_duals
from regard._core.dispatch import has_transform, why_not_carried
from regard._core.ops.backends import ATTENTION, backend_module
from regard._core.options import AttentionOptions
from regard._core.prepare import Call
from regard._core.problem import TENSORS, Kind, Problem
from regard.mask import Mask
from regard.statistics import Statistics

Plan = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Statistics]]
MAX_PLANS, MAX_INTERVALS = 1024, 16
NUMBER_OR_NONE = (float, int, type(None))
plans: dict[Hashable, Plan] = {}
settings: dict[Hashable, Setting] = {}  # of calls in forward mode
with_interval: list[Hashable] = []  # keys of plans that hold an interval per query, the oldest first


def plan_key(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Hashable | None:
    """Return the key of the plan of a call in plain eager mode; None for a call that has no plan."""
    mask, dropout_p, causal, scale, gqa, normalizer, temperature, softcap, _, _, window, _, gate, stats, backend = (
        options
    )
    if not (
        type(q) is type(k) is type(v) is Tensor
        and options.sink is options.key_lengths is options.score_mod is None
        and (mask is None or (type(mask) is Mask and mask.has_plan))
        and type(causal) is type(gqa) is bool
        and type(dropout_p) in NUMBER_OR_NONE
        and (type(scale) in NUMBER_OR_NONE or type(scale) is str)
        and type(temperature) in NUMBER_OR_NONE
        and type(softcap) in NUMBER_OR_NONE
        and type(normalizer) is str
        and (type(stats) is bool or type(stats) is str or (type(stats) is tuple and all(type(x) is str for x in stats)))
        and (gate is None or type(gate) is Tensor)
        and (window is None or (type(window) is tuple and all(type(side) in (int, type(None)) for side in window)))
        and (backend is None or type(backend) is str)
        and q.layout is k.layout is v.layout is torch.strided
    ):
        return None
    device = q.device
    if device.type not in ("cpu", "cuda"):
        return None
    autocast = torch.is_autocast_enabled(device.type)
    if autocast and q.dtype != torch.get_autocast_dtype(device.type):
        return None
    same = q.dtype is k.dtype is v.dtype and device == k.device == v.device
    shapes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    modes = torch.are_deterministic_algorithms_enabled(), autocast, normalizers.generation()
    parts = None if mask is None else mask.parts
    gated = None if gate is None else (gate.shape, gate.dtype, gate.device, gate.layout)
    scalars = parts, causal, scale, gqa, normalizer, temperature, softcap, window, stats, backend
    return (shapes, q.dtype, device, dropout_p, gated, scalars, modes) if same else None


def keep_plan(key: Hashable, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """Keep a plan for calls like this one, if one can be made."""
    plan = make_plan(q, k, v, call)
    if plan is None:
        return
    if len(plans) >= MAX_PLANS:
        plans.clear()
        with_interval.clear()
    plans[key] = plan
    if call.interval is not None:  # which takes memory, and a step of packed batches brings new ones
        with_interval.append(key)
        if len(with_interval) > MAX_INTERVALS:
            plans.pop(with_interval.pop(0), None)


def make_plan(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Plan | None:
    """The plan of a call whose tensors are used as they came; None where something would have to be done to them."""
    problem = call.problem
    same = all(given.shape == used.shape for given, used in ((q, problem.q), (k, problem.k), (v, problem.v)))
    if not same or problem.q.dtype != call.dtype or call.policy is not None or call.temperature is not None:
        return None
    if call.theta is not None or problem.dropout_p or not q.numel() or not k.numel() or not v.numel():
        return None
    if call.path.backend == "torch":
        cut = problem.causal and k.shape[2] > q.shape[2]
        return None if cut or call.wanted is not None else _torch_plan(problem)
    if call.path.backend in ("cpu", "triton") and (problem.choice.merges or not problem.stats):
        module = backend_module(ATTENTION, call.path.backend)
        options = replace(problem.without_tensors(), kind=Kind(), interval=problem.interval)
        rest = tuple(getattr(options, field.name) for field in fields(Problem)[3:])
        small = module.plan(problem) if call.path.backend == "cpu" and not torch.is_autocast_enabled("cpu") else None
        return partial(_run_fused, options, rest, module, small, call.wanted)
    return None


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
        key = plan_key(q, k, v, options)
    return None if key is None else (duals, key)


def keep_setting(key: Hashable, call: Call) -> None:
    """Keep how a call in forward mode is computed, if its tensors are used as they came."""
    problem, shapes = call.problem, key[0]  # type: ignore[index]
    same = shapes[:3] == (problem.q.shape, problem.k.shape, problem.v.shape) and problem.q.dtype == call.dtype
    others = call.policy, call.wanted, *call.inputs[3:]
    carried = call.path.backend in ("cpu", "triton") and has_transform(problem) and why_not_carried(problem) is None
    if same and carried and all(x is None for x in others) and not problem.dropout_p and problem.v.numel():
        if len(settings) >= MAX_PLANS:
            settings.clear()
        settings[key] = Setting(problem.without_tensors(), call.path.backend, (0, 1, 2))


def _torch_plan(problem: Problem) -> Plan:
    attend, plain = plan_attention(problem)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        return differentiable_twice(out, (q, k, v), plain) if out.requires_grad else out

    return run


def _run_fused(
    options: Problem, rest: tuple, module: ModuleType, small: Callable | None, wanted: tuple[str, ...] | None,
    q: Tensor, k: Tensor, v: Tensor,
) -> Tensor | tuple[Tensor, Statistics]:  # fmt: skip
    order = options.stats
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        problem = Problem(q, k, v, *rest)
        problem.stats = order = statistics.with_gradient_inputs(order, options.choice)
        given = (options.interval if name == "interval" else None for name in TENSORS[3:])
        out, stacked = FusedAttention.apply(problem, module, q, k, v, *given)
    elif small is not None:
        out, stacked = small(q, k, v)
    else:
        out, stacked = module.attend(Problem(q, k, v, *rest))
    if wanted is None:
        return out
    return out, Statistics.of_stacked(stacked, order, wanted, options.choice)
