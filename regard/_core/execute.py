"""Computes a checked call: through torch, through a fused backend, or block by block through the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakIdKeyDictionary

from regard import reference, statistics
from regard._call.options import check_policy_result
from regard._call.problem import Problem
from regard._core import cudnn_forward, ops
from regard._core.derivatives import transforms
from regard._core.derivatives.autograd import FusedAttention, differentiable_twice
from regard._core.dispatch import PLAIN, REQUESTED, TRANSFORM, has_transform, unfused_error, why_not_carried
from regard._core.formulas import apply_gate
from regard._core.ops.backends import ATTENTION, backend_module
from regard._core.prepare import PreparedCall
from regard._facts import is_mapped, is_plain_eager, is_transformed
from regard.statistics import Statistics
from regard.temperature.rows import Rows, visible_keys

opened_rows = WeakIdKeyDictionary()  # mask given to torch -> rows that see no key: opened there, zeroed afterwards
MOVED = ("max_logit", "mean_logit", "logsumexp")  # by a number that is added to every score of a row


def execute(call: PreparedCall) -> Tensor | tuple[Tensor, Statistics]:
    """The result of a call in the shape, dtype and form that its caller asked for."""
    return finish(call, *RUN[call.path.backend](call))


def finish(call: PreparedCall, out: Tensor, stacked: Tensor | None, order: tuple[str, ...]) -> Any:
    """The result of a call from o [B, H, M, E] and its statistics, stacked in an order."""
    out = out.reshape(*call.lead, *out.shape[-2:]).to(call.dtype)
    out = out if call.gate is None else apply_gate(out, call.gate)
    if not call.wanted:
        return out if call.wanted is None else (out, Statistics())
    assert stacked is not None  # statistics were asked for
    stacked = stacked if call.row_shift is None else shift_logits(call, stacked, order)
    stacked = stacked.reshape(stacked.shape[0], *out.shape[:-1])
    return out, Statistics.of_stacked(stacked, order, call.wanted, call.problem.choice)


def shift_logits(call: PreparedCall, stacked: Tensor, order: tuple[str, ...]) -> Tensor:
    """Add a bias per query, over the temperature, to the statistics of the logits that it moves."""
    assert call.row_shift is not None
    temperature = call.given["temperature"]
    shift = call.row_shift if temperature is None else call.row_shift / temperature
    shift = torch.where(stacked[order.index("visible_keys")] > 0, shift, 0.0)
    return torch.stack([x + shift if name in MOVED else x for name, x in zip(order, stacked, strict=True)])


Result = tuple[Tensor, Tensor | None, tuple[str, ...]]  # o [B, H, M, E], statistics [S, B, H, M], their names


def run_torch(call: PreparedCall) -> Result:
    """Plain softmax by torch's sdpa; rows that see no key are 0, and hidden keys cannot leak, not even as NaN."""
    problem = call.problem
    q, k, v = problem.q, problem.k, problem.v
    if problem.causal and isinstance(k.shape[2], torch.SymInt):  # a comparison would bind the exported lengths
        hidden = (torch.arange(k.shape[2], device=k.device) >= q.shape[2])[:, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    elif problem.causal and k.shape[2] > q.shape[2]:  # keys that no query sees
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    mask = call.given["bias"] if problem.bias is not None else call.given["mask"]
    if problem.key_lengths is not None:
        keys = torch.arange(k.shape[2], device=k.device)
        visible = (keys < problem.key_lengths[:, None])[:, None, None, :]
        mask = visible if mask is None else mask & visible
    empty = None
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask != -math.inf
        empty = ~visible.any(-1, keepdim=True)  # rows without a visible key: opened, then zeroed
        unseen = ~visible.any(-2)[..., None]  # [B, H, N, 1]: keys without a query
        mask = mask | empty if mask.dtype == torch.bool else mask.masked_fill(empty, 0.0)
        group = unseen.shape[1] // k.shape[1] if unseen.shape[1] > k.shape[1] > 0 else 1
        if group > 1:
            unseen = unseen.unflatten(1, (k.shape[1], group)).all(2)
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        if mask.dtype not in (torch.bool, q.dtype):
            mask = mask.to(torch.promote_types(q.dtype, torch.float32))  # 16 bits would merge different biases
        if not torch.compiler.is_compiling():
            opened_rows[mask] = empty
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  # of symbols, != is no bool to torch
    options: dict[str, Any] = dict(attn_mask=mask, dropout_p=problem.dropout_p, is_causal=problem.causal)
    options |= dict(scale=problem.scale, enable_gqa=grouped)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    if is_transformed(q, k, v, mask):  # torch's fused kernels know neither tangents nor second derivatives
        with sdpa_kernel(SDPBackend.MATH):
            out = attend(q, k, v)
    else:
        out = cudnn_forward.attend(q, k, v, **options)
    if not problem.dropout_p and not torch.compiler.is_compiling() and not is_mapped(out):
        out = differentiable_twice(out, (q, k, v), attend)
    return (out if empty is None else out.masked_fill(empty, 0.0)), None, ()


def draw_seed(problem: Problem) -> Tensor | None:
    """The seed of dropout, from torch's generator; None without dropout."""
    if not problem.dropout_p:
        return None
    return torch.randint(0, 2**62, (1,), device=problem.q.device, dtype=torch.int64)


def apply_policy(call: PreparedCall) -> PreparedCall:
    """Ask the temperature policy of a call, if it has one, for its tensor."""
    if call.policy is None:
        return call

    def measure(names):
        plain = replace(call.problem, stats=statistics.resolve(names), dropout_p=0.0)
        _, stacked, order = RUN[call.path.backend](replace(call, problem=plain, policy=None, wanted=plain.stats))
        return {name: stacked[order.index(name)] for name in plain.stats}

    asked = check_policy_tensor(call, call.policy(visible_keys(call.problem), Rows(call.queries, measure)))
    problem = replace(call.problem, temperature=asked.expand(call.problem.q.shape[:3]))
    return replace(call, problem=problem, given={**call.given, "temperature": asked}, policy=None)


def check_policy_tensor(call: PreparedCall, asked) -> Tensor:
    """Check what a policy returned and give it 3 dims that broadcast to [B, H, M]."""
    asked = check_policy_result(asked, call.policy, call.problem.q.shape[:3])
    asked = asked.to(call.problem.q.device, call.problem.accumulator)
    asked = asked.reshape(*(1,) * (3 - asked.ndim), *asked.shape)
    own = call.given["temperature"]  # a scale per head
    return asked if own is None else asked * own


def run_fused(call: PreparedCall) -> Result:
    """Attention by the CPU or GPU kernels: directly, or as a custom op where something records the call."""
    call = apply_policy(call)
    problem = call.problem
    if not is_plain_eager() and has_transform(problem):
        return run_transformed(call)
    if problem.stats and not problem.choice.merges:  # no kernel's sums give them
        out, _, _ = run_fused(replace(call, problem=replace(problem, stats=())))
        with torch.no_grad():
            return out, *dense_attention(call)[1:]
    order = problem.stats
    learns = any(x is not None and (type(x) not in PLAIN or x.requires_grad) for x in call.inputs)
    if learns or not is_plain_eager():  # a mapped or traced tensor does not say whether it will have a gradient
        order = statistics.with_gradient_inputs(order, problem.choice)
    if problem.dropout_p or order != problem.stats:
        call = replace(call, problem=replace(problem, stats=order, seed=draw_seed(problem)))
    out, stacked = run_kernels(call.problem, call.inputs, call.path.backend)
    return out, stacked, order


def run_transformed(call: PreparedCall) -> Result:
    """Attention inside torch.func or forward mode, by kernels where they can carry it."""
    reason = why_not_carried(call.problem)
    if reason is None:
        problem = replace(call.problem, seed=draw_seed(call.problem))
        inputs = replace(call, problem=problem).inputs
        return transforms.attend(problem.without_tensors(), call.path.backend, inputs), None, ()
    if call.path.reason == REQUESTED:
        raise unfused_error(call.path.backend, f"{TRANSFORM} beside {reason}")
    return dense_attention(call)


def run_kernels(problem: Problem, inputs: tuple[Tensor | None, ...], backend: str) -> tuple[Tensor, Tensor]:
    """(o, statistics) by a fused backend; `inputs` are the tensors that gradients flow to."""
    if problem.q.is_meta or not is_plain_eager() or not all(x is None or type(x) in PLAIN for x in inputs):
        o, _, _, stacked = ops.attention(*inputs, *problem.flatten(), backend)
        return o, stacked
    module = backend_module(ATTENTION, backend)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return FusedAttention.apply(problem, module, *inputs)
    return module.attend(problem)


def run_reference(call: PreparedCall) -> Result:
    """Attention by the float64 reference, visible to torch function modes as an op would be."""
    call = apply_policy(call)
    given = call.problem.q, call.problem.k, call.problem.v
    if not torch.compiler.is_compiling() and has_torch_function(given):
        return handle_torch_function(dense_attention, given, call)
    return dense_attention(call)


def dense_attention(call: PreparedCall) -> Result:
    """(o, statistics, names) of a call whose policy was asked, by the dense reference."""
    problem = replace(call.problem, seed=draw_seed(call.problem))
    if has_transform(problem):
        out, stacked = reference.of_whole(problem)  # checkpoints do not go through transforms
    else:
        out, stacked = reference.of_problem(problem)
    return out.to(problem.q.dtype), stacked.to(problem.accumulator), problem.stats


RUN = {"torch": run_torch, "cpu": run_fused, "triton": run_fused, "reference": run_reference}
