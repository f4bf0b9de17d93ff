"""A checked call, computed: through torch, through the fused ops, or block by block through the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function

from regard import reference, statistics
from regard._core import ops
from regard._core.call import Call
from regard._core.device import has_bulk_copies
from regard._core.dispatch import ASKED, cannot_carry, is_transformed
from regard._core.double_backward import differentiable_twice
from regard._core.problem import Problem
from regard._core.readable import is_mapped, readable
from regard._core.rows.execute import transformed
from regard._core.validation import check_asked
from regard.temperature import Rows, visible_keys

HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _run_torch(call: Call):
    problem = call.problem
    q, k, v = problem.q, problem.k, problem.v
    if problem.causal and k.shape[2] > q.shape[2]:  # keys that no query sees
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    mask = call.bias if call.bias is not None else call.mask
    if problem.key_lengths is not None:
        keys = torch.arange(k.shape[2], device=k.device)
        shown = (keys < problem.key_lengths[:, None])[:, None, None, :]
        mask = shown if mask is None else mask & shown
    dead = None
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask != -math.inf
        dead = ~shown.any(-1, keepdim=True)  # rows that see nothing: opened, then blanked
        unseen = ~shown.any(-2)[..., None]  # [B, H, N, 1]: keys nobody sees must not leak, not even as NaN
        mask = mask | dead if mask.dtype == torch.bool else mask.masked_fill(dead, 0.0)
        group = unseen.shape[1] // k.shape[1] if unseen.shape[1] > k.shape[1] > 0 else 1
        if group > 1:
            unseen = unseen.unflatten(1, (k.shape[1], group)).all(2)
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        if mask.dtype not in (torch.bool, q.dtype):
            mask = mask.to(torch.promote_types(q.dtype, torch.float32))  # in 16 bits it would lose what it tells apart
        if not torch.compiler.is_compiling():
            mask.sees_nothing = dead  # type: ignore[attr-defined]  # for who measures the call: not to be counted
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  # of symbols, != is no bool to torch
    options = dict(attn_mask=mask, dropout_p=problem.dropout_p, is_causal=problem.causal, scale=problem.scale)
    options["enable_gqa"] = grouped

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    if transformed(q, k, v, mask):  # torch's fused kernels know neither tangents nor second derivatives
        with sdpa_kernel(SDPBackend.MATH):
            out = attend(q, k, v)
    elif q.device.type == "cuda" and has_bulk_copies(q.device):
        with sdpa_kernel(HOPPER_ORDER, set_priority=True):
            out = attend(q, k, v)
    else:
        out = attend(q, k, v)
    if not problem.dropout_p and not torch.compiler.is_compiling() and not is_mapped(out):
        out = differentiable_twice(out, (q, k, v), attend)
    if mask is None:
        out = _with_nan(out, q, k)
    return (out if dead is None else out.masked_fill(dead, 0.0)), {}


def _with_nan(out: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Over fewer keys than a register holds, torch's CPU kernel answers 0 for a row whose logits are all NaN.

    Without a mask every row sees key 0, so that its logit tells.
    """
    if torch.compiler.is_compiling() or not 0 < k.shape[2] < 16 or not out.numel() or not readable(out):
        return out
    if not bool((out.detach()[..., 0] == 0).any()):
        return out
    first = k.detach()[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    logit = (q.detach() * first).sum(-1, keepdim=True, dtype=torch.float64)
    lost = logit.isnan() & (out.detach() == 0).all(-1, keepdim=True)
    return out + torch.zeros_like(logit, dtype=out.dtype).masked_fill(lost, math.nan) if bool(lost.any()) else out


def _seeded(problem: Problem) -> Tensor | None:
    if not problem.dropout_p:
        return None
    return torch.randint(0, 2**62, (1,), device=problem.q.device, dtype=torch.int64)


def with_policy(call: Call) -> Call:
    """Ask the temperature policy, if there is one, for its tensor."""
    if call.policy is None:
        return call

    def measure(names):
        plain = replace(call.problem, stats=statistics.resolve(names), dropout_p=0.0)
        return RUN[call.path.backend](replace(call, problem=plain, policy=None, wanted=plain.stats))[1]

    asked = settled(call, call.policy(visible_keys(call.problem), Rows(call.queries, measure)))
    problem = replace(call.problem, temperature=asked.expand(call.problem.q.shape[:3]))
    return replace(call, problem=problem, temperature=asked, policy=None)


def settled(call: Call, asked) -> Tensor:
    """What a call's policy gave, as a tensor of 3 dims that broadcasts to [B, H, M]."""
    asked = check_asked(asked, call.policy, call.problem.q.shape[:3])
    asked = asked.to(call.problem.q.device, call.problem.accumulator)
    asked = asked.reshape(*(1,) * (3 - asked.ndim), *asked.shape)
    return asked if call.temperature is None else asked * call.temperature  # the latter is a scale per head


def _run_fused(call: Call):
    call = with_policy(call)
    problem = call.problem
    if transformed(problem.temperature):  # by what the policy holds
        if call.path.reason == ASKED:
            raise cannot_carry(call.path.backend)
        return by_reference(call)
    if problem.stats and not problem.choice.merges:  # no kernel's sums tell them
        out, _ = _run_fused(replace(call, problem=replace(problem, stats=())))
        with torch.no_grad():
            return out, by_reference(call)[1]
    names = statistics.with_helpers(problem.stats, problem.choice)
    left, right = (-1 if side is None else side for side in (problem.left, problem.right))
    o, _, _, values = ops.attention(
        problem.q,
        problem.k,
        problem.v,
        call.bias,
        call.mask,
        call.temperature,
        call.sink,
        problem.key_lengths,
        _seeded(problem),
        problem.scale,
        problem.softcap or 0.0,
        problem.causal,
        left,
        right,
        problem.dropout_p,
        problem.choice.spec,
        ",".join(names),
        call.path.backend,
    )
    return o, statistics.marked({name: values[index] for index, name in enumerate(names)}, problem.choice)


def _run_reference(call: Call):
    call = with_policy(call)
    given = call.problem.q, call.problem.k, call.problem.v
    if not torch.compiler.is_compiling() and has_torch_function(given):  # as an op asks who looks on
        return handle_torch_function(by_reference, given, call)
    return by_reference(call)


def by_reference(call: Call):
    """(o, statistics) of a call whose policy was asked, by the dense reference."""
    problem = replace(call.problem, seed=_seeded(call.problem))
    if is_transformed(problem):
        out, stacked = reference.of_whole(problem)  # checkpoints do not go through transforms
    else:
        out, stacked = reference.of_problem(problem)
    stats = {name: x.to(problem.accumulator) for name, x in zip(problem.stats, stacked, strict=False)}
    return out.to(problem.q.dtype), statistics.marked(stats, problem.choice)


RUN = {"torch": _run_torch, "cpu": _run_fused, "triton": _run_fused, "reference": _run_reference}
