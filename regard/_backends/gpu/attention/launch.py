"""Launch: a `Problem` on CUDA (or interpreted) to a `Forward`, and back to `Gradients`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton

from regard._backends.gpu.attention import decode
from regard._backends.gpu.attention.backward import dkv, stored_ds
from regard._backends.gpu.attention.backward.bias import backward_bias
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.backward.two_sweeps import backward_dq, backward_rows
from regard._backends.gpu.attention.config import config_of, key_blocks, linear, options, view
from regard._backends.gpu.attention.hopper import launch as hopper
from regard._backends.gpu.attention.hopper.finish_statistics import ROWS, forward_statistics
from regard._backends.gpu.attention.hopper.recompute_imprecise import forward_imprecise
from regard._backends.gpu.attention.hopper.recompute_overflow import forward_overflow
from regard._backends.gpu.attention.online import forward_online
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._backends.gpu.attention.threshold import forward_threshold
from regard._backends.gpu.attention.tiles import Config
from regard._backends.gpu.launcher import kind_of, launch, on_device_of
from regard._core.problem import Forward, Gradients, Problem, Upstream

# The threshold solver: most steps; how far from Σp = 1 keys that cross the threshold in the last step may leave a row
# whose map is t²; |Σp − 1| before the last step for the other maps. Statistics are told in float32 and want its bounds.
SOLVER = {
    torch.float64: (64, 1e-14, 1e-9),
    torch.float32: (40, 1e-6, 3e-6),
    torch.float16: (40, 3e-3, 1e-4),
    torch.bfloat16: (40, 3e-3, 1e-4),
}
LONGEST = 128  # rows of a block


def forward(problem: Problem, o: torch.Tensor | None = None) -> Forward:
    """Compute o, the row state and the statistics of one call. `o` may be a preallocated output of any strides."""
    with on_device_of(problem.q):
        return _forward(_near(problem), o if o is None or _is_near(o) else None)


def _forward(p: Problem, o: torch.Tensor | None) -> Forward:
    if p.sink is not None and not (p.choice.family == "ratio" and p.choice.exponential):
        raise ValueError(f"sink joins Σ exp(s), which {p.choice.name!r} has not; use softmax or softmax1, or drop sink")
    shape, like = p.q.shape[:-1], dict(dtype=p.accumulator, device=p.q.device)
    o = torch.empty(*shape, p.v.shape[-1], dtype=p.q.dtype, device=p.q.device) if o is None else o
    shift, z = torch.empty(shape, **like), torch.empty(shape, **like)
    stats = torch.empty(len(p.stats), *shape, **like)
    if p.k.shape[-2] == 0:
        return _unseeing(p, o, shift, z, stats)
    if o.numel() == 0 and shift.numel() == 0:
        return Forward(o, shift, z, stats)
    if decode.suits(p):
        config, how = config_of(p, "forward_decode")
        inputs, outputs = (view(p.q), view(p.k), view(p.v)), (view(o), shift, z, stats)
        decode.forward(p, inputs, key_blocks(p, config), outputs, options(p), config, how)
        return Forward(o, shift, z, stats)
    kind, opt = kind_of(p, o), options(p)
    if hopper.takes(p):
        hopper.forward(p, o, shift, z, opt, kind, lambda rough: _statistics(p, rough, stats, opt, kind))
        if hopper.still(p):
            _again(p, o, shift, z, stats, opt, kind)
        return Forward(o, shift, z, stats)
    kernel = forward_threshold if p.choice.family == "threshold" else forward_online
    config, how = config_of(p, kernel.__name__)
    blocks = triton.cdiv(shape[-1], config.BM) * shape[0] * shape[1]
    views = view(p.q), view(p.k), view(p.v)
    arguments = *views, *key_blocks(p, config), view(o), shift, z, stats
    if kernel is forward_threshold:
        steps, square, other = SOLVER[p.accumulator if p.stats else p.q.dtype]
        failed = None
        if sparse.takes(p, "forward"):
            failed = sparse.forward(p, kind, views, view(o), shift, z, stats, opt, config, steps)
        arguments, constants = (*arguments, failed, opt), (config, steps, square if p.choice.order == 2 else other)
    else:
        arguments, constants = (*arguments, opt), (config,)
    launch(kind, kernel, blocks, arguments, constants, **how)
    return Forward(o, shift, z, stats)


def _again(p: Problem, o: torch.Tensor, shift: torch.Tensor, z: torch.Tensor, stats: torch.Tensor, opt, kind) -> None:
    """Rows that the Hopper kernel could not hold in one shift."""
    config, how = config_of(p, "forward_online")
    heads, many = p.q.shape[0] * p.q.shape[1], 4
    programs = triton.cdiv(triton.cdiv(p.q.shape[-2], config.BM) * heads, many)
    outputs = view(o), shift, z, stats, heads * p.q.shape[-2]
    arguments = view(p.q), view(p.k), view(p.v), *key_blocks(p, config), *outputs, opt
    launch(kind, forward_overflow, programs, arguments, (config, many), **how)


def _statistics(p: Problem, rough: torch.Tensor, stats: torch.Tensor, opt, kind) -> None:
    """Of the sums that the Hopper kernel leaves; vague rows are summed again."""
    config, how = config_of(p, "forward_imprecise")
    rows, many = p.q.shape[0] * p.q.shape[1] * p.q.shape[2], 8
    launch(kind, forward_statistics, triton.cdiv(rows, ROWS), (rough, stats, rows, opt), (config, ROWS))
    if not (config.NEED.shares or config.NEED.moments):
        return
    programs = triton.cdiv(triton.cdiv(p.q.shape[-2], config.BM) * p.q.shape[0] * p.q.shape[1], many)
    arguments = view(p.q), view(p.k), view(p.v), *key_blocks(p, config), rough, stats, rows, opt
    launch(kind, forward_imprecise, programs, arguments, (config, many), **how)


def backward(problem: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Gradients of q, k, v and of what `upstream` asks for; see `regard._core.problem`."""
    with on_device_of(problem.q):
        return _backward(_near(problem), forward, replace(upstream, o=_gathered(upstream.o)))


def _near(p: Problem) -> Problem:
    """The same problem with tensors whose blocks the kernels can walk."""
    near = all(map(_is_near, (p.q, p.k, p.v)))
    return p if near else replace(p, q=_gathered(p.q), k=_gathered(p.k), v=_gathered(p.v))


def _gathered(x: torch.Tensor) -> torch.Tensor:
    return x if _is_near(x) else x.contiguous()


def _is_near(x: torch.Tensor) -> bool:
    """Within a block of rows the kernels count in 32 bits: does each entry of one lie as near to its first?"""
    return LONGEST * x.stride(-2) < 2**31 and 2 * x.shape[-1] * x.stride(-1) < 2**31


def _backward(p: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    do = upstream.o
    shape, like = p.q.shape[:-1], dict(dtype=p.accumulator, device=p.q.device)
    grads = Gradients(torch.empty_like(p.q), torch.empty_like(p.k), torch.empty_like(p.v))
    heat = torch.empty(shape, **like) if upstream.temperature and p.temperature is not None else None
    if forward.shift.numel() == 0 or p.k.shape[-2] == 0:
        return _nothing_flows(p, upstream, grads, like)
    kind = kind_of(p, do, forward.o, forward.shift, forward.z)
    opt, rows = options(p), shape[0] * shape[1]
    tilted, family = bool(upstream.stats), p.choice.family
    # where 16 bits cannot tell, 1/Z joins the exponent of exp(s − m)/Z
    folded = family == "ratio" and p.choice.exponential and p.q.element_size() == 2 and not tilted
    shift = forward.shift if family == "threshold" else torch.empty(shape, **like)
    inverse = torch.empty(shape, **like) if (not folded if family == "ratio" else tilted) else None
    product = delta = torch.empty(shape, **like)
    state = State(shift, inverse, delta, None, None, None)
    inputs = view(p.q), view(p.k), view(p.v), view(do)
    stored = stored_ds.takes(p, do, heat is not None)
    if tilted or stored:
        config, how = config_of(p, "backward_rows", FOLDED=folded)
        arguments = inputs[0], view(forward.o), inputs[3], forward.shift, forward.z, state, opt
        launch(kind, backward_rows, triton.cdiv(shape[-1], config.BM) * rows, arguments, (config,), **how)
    if tilted:
        product = delta.clone()
        state = state._replace(**_tilt(p, forward, upstream, delta))
    flags = dict(TILTED=tilted, HEAT=heat is not None, FOLDED=folded, others=(do,))
    if stored:
        stored_ds.backward(p, do, state, grads, flags)
    else:
        _sweep_twice(p, forward, do, state, grads, heat, opt, kind, flags)
    if upstream.bias and p.bias is not None:
        grads.bias = _bias_gradient(p, inputs, state, opt, *config_of(p, "backward_bias", **flags))
    grads.temperature = heat
    if upstream.sink and p.sink is not None:
        share = torch.exp(p.sink.to(delta.dtype) - forward.shift) / forward.z
        through = upstream.stats.get("logsumexp", 0.0) - product
        grads.sink = torch.where(forward.z > 0, share * through, 0.0)
    return grads


def _sweep_twice(p: Problem, forward: Forward, do, state: State, grads: Gradients, heat, opt, kind, flags) -> None:
    """dq, which finds δ on its way, then dk and dv."""
    inputs = view(p.q), view(p.k), view(p.v), view(do)
    config, how = config_of(p, "backward_dq", **flags)
    left = None, None
    if sparse.takes(p, "backward") and heat is None and not config.TILTED:
        outputs = view(grads.q), view(grads.k), view(grads.v)
        left = sparse.backward(p, kind, inputs, forward.shift, forward.z, outputs, state.delta, opt, config)
    left = iter(left)
    queries = view(forward.o), inputs[3], view(grads.q), heat, forward.shift, forward.z, state
    arguments = *inputs[:3], *key_blocks(p, config), *queries, next(left), opt
    blocks = triton.cdiv(p.q.shape[-2], config.BM) * p.q.shape[0] * p.q.shape[1]
    launch(kind, backward_dq, blocks, arguments, (config,), **how)
    dkv.run(p, do, state, None, grads.k, grads.v, next(left), flags)


def _bias_gradient(p: Problem, inputs, state, opt, config: Config, how: dict) -> torch.Tensor:
    sizes = _given_sizes(p.bias)
    grad = torch.empty(sizes, dtype=p.bias.dtype, device=p.bias.device)
    (b, h, m, n), over = p.bias.shape, []
    counts = (b, h, triton.cdiv(m, config.BM), triton.cdiv(n, config.BN))
    for count, size in zip(counts, sizes, strict=True):
        over.append(count if size == 1 else 1)
    programs = math.prod(count // many for count, many in zip(counts, over, strict=True))
    backward_bias[(programs,)](*inputs, view(grad), state, opt, *over, config, sizes[2] == 1, sizes[3] == 1, **how)
    return grad


def _given_sizes(bias: torch.Tensor) -> list[int]:
    """The shape of an expanded tensor before it was expanded."""
    return [1 if stride == 0 else size for size, stride in zip(bias.shape, bias.stride(), strict=True)]


def _tilt(p: Problem, forward: Forward, upstream: Upstream, delta: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the statistics' gradients add to ds, per row: p·(β·log2 e) + γ·y + ε; their part of δ goes into `delta`.

    ds += g_lse·p − g_H·p̄·(log p̄ + H) + 2·g_var·(s − mean)/n, with log p̄ = ln 2·log2 e − log(Z·mass), s = a·y.
    """
    stats = dict(zip(p.stats, forward.stats, strict=True))
    zero = torch.zeros_like(delta)
    beta, gamma, epsilon = zero, zero, zero
    if "logsumexp" in upstream.stats:
        delta -= upstream.stats["logsumexp"]
    if "entropy" in upstream.stats:
        mass = stats["mass"]
        alive = (mass > 0) & (forward.z > 0)
        pull = torch.where(alive, upstream.stats["entropy"] / torch.where(alive, mass, 1.0), 0.0)
        delta += pull * (stats["entropy"] - torch.log(torch.where(alive, forward.z * mass, 1.0)))
        beta = (pull * -math.log(2.0)).contiguous()
    if "logit_variance" in upstream.stats:
        n = stats["visible_keys"]
        pull = torch.where(n > 0, 2.0 * upstream.stats["logit_variance"] / n.clamp_min(1.0), 0.0)
        a = p.scale if linear(p) else 1.0
        a = a if p.temperature is None else a / p.temperature.to(delta.dtype)
        gamma, epsilon = (pull * a).contiguous(), (-pull * stats["mean_logit"]).contiguous()
    return dict(beta=beta, gamma=gamma, epsilon=epsilon)


def _nothing_flows(p: Problem, upstream: Upstream, grads: Gradients, like: dict) -> Gradients:
    for tensor in (grads.q, grads.k, grads.v):
        tensor.zero_()
    if upstream.temperature and p.temperature is not None:
        grads.temperature = torch.zeros(p.q.shape[:-1], **like)
    if upstream.sink and p.sink is not None:
        grads.sink = torch.zeros(p.q.shape[:-1], **like)
    if upstream.bias and p.bias is not None:
        grads.bias = torch.zeros(_given_sizes(p.bias), dtype=p.bias.dtype, device=p.bias.device)
    return grads


def _unseeing(p: Problem, o, shift, z, stats) -> Forward:
    for tensor in (o, shift, z, stats):
        tensor.zero_()
    for row, name in zip(stats, p.stats, strict=True):
        if name in ("max_logit", "logsumexp"):
            row.fill_(float("-inf"))
    return Forward(o, shift, z, stats)
