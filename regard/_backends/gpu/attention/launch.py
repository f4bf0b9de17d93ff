"""The GPU backend of attention: `forward` gives a `Forward` of a `Problem`, `backward` its `Gradients`.

`attend` is `forward` without the row state that `backward` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from regard._backends.gpu import tape
from regard._backends.gpu.attention import key_reading, registry
from regard._backends.gpu.attention.backward.bias import compute_bias_gradient, sum_key_gradient
from regard._backends.gpu.attention.backward.call import BackwardCall, add_statistic_terms
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.backward.two_sweeps import backward_rows
from regard._backends.gpu.attention.config import config_of, count_blocks, has_key_bias, options, unexpanded_shape, view
from regard._backends.gpu.attention.masks.dense import pack_mask
from regard._backends.gpu.attention.tangent import compute_tangent
from regard._backends.gpu.launcher import launch, on_device_of
from regard._call.problem import Along, Forward, Gradients, Problem, Upstream, tensors_of
from regard._facts import allowed_backends

BLOCK_ROWS = 128  # of the largest block


def forward(problem: Problem, o: torch.Tensor | None = None) -> Forward:
    """Compute o, the row state and the statistics of one call. `o` may be a preallocated output of any strides."""
    return Forward(*_run_recorded("forward", problem, o, lambda found: (found.o, found.shift, found.z, found.stats)))


def attend(problem: Problem, o: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute o and the statistics of a call that needs no gradient: a replay keeps no row state."""
    return _run_recorded("attend", problem, o, lambda found: (found.o, found.stats))


def _run_recorded(name: str, problem: Problem, o: torch.Tensor | None, pick: Callable[[Forward], tuple]) -> tuple:
    """What `pick` takes of the forward of a call, recorded and replayed for calls like it."""

    def compute() -> tuple:
        return pick(_forward(_with_near_entries(problem), o if o is None or _has_near_entries(o) else None))

    with on_device_of(problem.q):
        if not _has_tape(problem):
            return compute()
        inputs = (*tensors_of(problem), o)
        return tape.run((name, problem.key, problem.stats, tape.key_of(inputs)), inputs, compute)


def _forward(p: Problem, o: torch.Tensor | None) -> Forward:
    if p.sink is not None and not (p.choice.family == "ratio" and p.choice.exponential):
        raise ValueError(f"sink joins Σ exp(s), which {p.choice.name!r} has not; use softmax or softmax1, or drop sink")
    shape, like = p.q.shape[:-1], dict(dtype=p.accumulator, device=p.q.device)
    o = torch.empty(*shape, p.v.shape[-1], dtype=p.q.dtype, device=p.q.device) if o is None else o
    shift, z = torch.empty(shape, **like), torch.empty(shape, **like)
    result = Forward(o, shift, z, torch.empty(len(p.stats), *shape, **like))
    if p.k.shape[-2] == 0:
        _fill_empty_rows(p, result)
    elif o.numel() or shift.numel():
        _run_forward(p, result)
    return result


def _run_forward(p: Problem, result: Forward) -> None:
    """Run the kernel of a call and, if its mask may say intervals, before it the faster kernel that takes those.

    The host does not wait to learn which of the two it is: of a mask with holes the faster kernel gets rows without
    keys, and of a mask without holes the other kernel ends at once.
    """
    kernel, bare = registry.choose(p), registry.choose_bare(p)
    if bare is None:
        kernel.run(p, result)
        return
    packed = pack_mask(p, bare)
    registry.choose(bare).run(bare, result)
    kernel.run(p, result, packed)


def backward(problem: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Compute the gradients of q, k, v and of what `upstream` asks for."""

    def compute() -> tuple:
        do = replace(upstream, o=_gather_entries(upstream.o))
        g = _backward(_with_near_entries(problem), forward, do)
        return g.q, g.k, g.v, g.bias, g.temperature, g.sink, g.row_bias, g.relative, g.theta

    with on_device_of(problem.q):
        if not _has_tape(problem):
            return Gradients(*compute())
        biases = upstream.bias, upstream.row_bias, upstream.relative
        wants = *biases, upstream.temperature, upstream.sink, upstream.theta, tuple(upstream.stats)
        saved = forward.o, forward.shift, forward.z, forward.stats, upstream.o, *upstream.stats.values()
        inputs = (*tensors_of(problem), *saved)
        modes = torch.are_deterministic_algorithms_enabled(), allowed_backends()
        key = "backward", problem.key, problem.stats, wants, modes, tape.key_of(inputs)
        return Gradients(*tape.run(key, inputs, compute))


def tangent(problem: Problem, forward: Forward, along: Along) -> torch.Tensor:
    """Compute o′ for tangents of q, k and v."""

    def compute() -> tuple:
        given = (None if x is None else _gather_entries(x) for x in (along.q, along.k, along.v))
        return (compute_tangent(_with_near_entries(problem), forward, Along(*given)),)

    with on_device_of(problem.q):
        if not _has_tape(problem):
            return compute()[0]
        inputs = *tensors_of(problem), forward.o, forward.shift, forward.z, along.q, along.k, along.v
        return tape.run(("tangent", problem.key, tape.key_of(inputs)), inputs, compute)[0]


def read_keys(
    problem: Problem, forward: Forward, received: bool, most: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (Σ_i p_ij if `received`, index and weight of each row's `most` keys of most weight if any) of a call."""

    def compute() -> tuple:
        p = _with_near_entries(problem)
        top = key_reading.list_top_keys(p, forward, most) if most else (None, None)
        return (key_reading.sum_over_queries(p, forward) if received else None), *top

    with on_device_of(problem.q):
        if not _has_tape(problem):
            return compute()
        inputs = *tensors_of(problem), forward.shift, forward.z
        return tape.run(("keys", received, most, problem.key, tape.key_of(inputs)), inputs, compute)


def _has_tape(p: Problem) -> bool:
    """True if calls like this one are recorded and replayed; a dropout seed differs from call to call."""
    return p.q.is_cuda and not p.dropout_p


def _backward(p: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    do, family = upstream.o, p.choice.family
    shape, like = p.q.shape[:-1], dict(dtype=p.accumulator, device=p.q.device)
    grads = Gradients(torch.empty_like(p.q), torch.empty_like(p.k), torch.empty_like(p.v))
    if upstream.temperature and p.temperature is not None:
        grads.temperature = torch.empty(shape, **like)
    if upstream.row_bias and p.row_bias is not None:
        grads.row_bias = torch.empty(shape, **like)
    if upstream.theta and p.theta is not None:
        grads.theta = torch.empty(shape, **like)
    if forward.shift.numel() == 0 or p.k.shape[-2] == 0:
        return _fill_zero_gradients(p, upstream, grads, like)
    has_statistics = bool(upstream.stats)
    # where 16 bits do not show it, 1/Z joins the exponent of exp(s − m)/Z
    z_in_shift = family == "ratio" and p.choice.exponential and p.q.element_size() == 2 and not has_statistics
    shift = forward.shift if family == "threshold" else torch.empty(shape, **like)
    inverse = torch.empty(shape, **like) if (not z_in_shift if family == "ratio" else has_statistics) else None
    product = delta = torch.empty(shape, **like)
    wants_bias, key_bias = upstream.bias and p.bias is not None, upstream.bias and has_key_bias(p)
    if key_bias:
        grads.bias = torch.empty(*shape[:2], p.k.shape[-2], **like)  # of every head, until it is summed below
    flags = dict(
        STATS_GRAD=has_statistics,
        TEMPERATURE_GRAD=grads.temperature is not None,
        ROW_BIAS_GRAD=grads.row_bias is not None,
        KEY_BIAS_GRAD=key_bias,
        THETA_GRAD=grads.theta is not None,
        Z_IN_SHIFT=z_in_shift,
        others=(do,),
    )
    wants_relative = upstream.relative and p.relative is not None
    state = State(shift, inverse, delta, None, None, None)
    call = BackwardCall(p, forward, do, state, grads, flags, wants_relative=wants_relative)
    kernel, bare = registry.choose_backward(call), registry.choose_bare_backward(call)
    faster = kernel if bare is None else registry.choose_backward(call._replace(problem=bare))
    if has_statistics or kernel.needs_delta or faster.needs_delta:
        _compute_delta(call)
    if has_statistics:
        product = delta.clone()
        call = add_statistic_terms(call, upstream)
    packed = None
    if bare is not None:  # as in `_run_forward`
        packed = pack_mask(p, bare)
        faster.run(call._replace(problem=bare))
    kernel.run(call._replace(packed=packed))
    if wants_bias:
        grads.bias = sum_key_gradient(p, grads.bias) if key_bias else compute_bias_gradient(call)
    if upstream.sink and p.sink is not None:
        share = torch.exp(p.sink.to(delta.dtype) - forward.shift) / forward.z
        grads.sink = torch.where(forward.z > 0, share * (upstream.stats.get("logsumexp", 0.0) - product), 0.0)
    return grads


def _compute_delta(call: BackwardCall) -> None:
    """Fill δ, shift and 1/Z of every row, for kernels that cannot find δ on their way."""
    p, forward = call.problem, call.forward
    config, how = config_of(p, "backward_rows", Z_IN_SHIFT=call.flags["Z_IN_SHIFT"])
    arguments = view(p.q), view(forward.o), view(call.do), forward.shift, forward.z, call.rows, options(p)
    launch(call.key, backward_rows, count_blocks(p, config), arguments, (config,), **how)


def _with_near_entries(p: Problem) -> Problem:
    """Return the problem with q, k and v copied where the kernels could not address a block of them."""
    near = all(map(_has_near_entries, (p.q, p.k, p.v)))
    return p if near else replace(p, q=_gather_entries(p.q), k=_gather_entries(p.k), v=_gather_entries(p.v))


def _gather_entries(x: torch.Tensor) -> torch.Tensor:
    return x if _has_near_entries(x) else x.contiguous()


def _has_near_entries(x: torch.Tensor) -> bool:
    """True if 32-bit offsets reach every entry of a block of rows from its first."""
    return BLOCK_ROWS * x.stride(-2) < 2**31 and 2 * x.shape[-1] * x.stride(-1) < 2**31


def _fill_zero_gradients(p: Problem, upstream: Upstream, grads: Gradients, like: dict) -> Gradients:
    if upstream.relative and p.relative is not None:
        grads.relative = torch.zeros_like(p.relative)
    for tensor in (grads.q, grads.k, grads.v, grads.temperature, grads.row_bias, grads.theta):
        if tensor is not None:
            tensor.zero_()
    if upstream.sink and p.sink is not None:
        grads.sink = torch.zeros(p.q.shape[:-1], **like)
    if upstream.bias and p.bias is not None:
        grads.bias = torch.zeros(unexpanded_shape(p.bias), dtype=p.bias.dtype, device=p.bias.device)
    return grads


def _fill_empty_rows(p: Problem, result: Forward) -> None:
    for tensor in (result.o, result.shift, result.z, result.stats):
        tensor.zero_()
    for row, name in zip(result.stats, p.stats, strict=True):
        if name in ("max_logit", "logsumexp"):
            row.fill_(float("-inf"))
