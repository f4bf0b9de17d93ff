"""Launch: a `Problem` on CUDA (or interpreted) to a `Forward`, and back to `Gradients`.

Block sizes come from a small table; nothing is tuned at run time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from regard import philox
from regard.kernels import bundle, decode, hopper, sparse, statistics
from regard.kernels.backward import State, backward_dkv, backward_dq, backward_rows
from regard.kernels.backward_bias import backward_bias
from regard.kernels.forward_lesser import forward_lesser
from regard.kernels.forward_online import forward_online
from regard.kernels.forward_threshold import forward_threshold
from regard.kernels.launch import kind_of, launch
from regard.kernels.tiles import Config, Options, View
from regard.problem import Forward, Gradients, Problem, Upstream

# The threshold solver: most steps; how far from Σp = 1 keys that cross the threshold in the last step may leave a row
# whose map is t²; |Σp − 1| before the last step for the other maps.
SOLVER = {
    torch.float64: (64, 1e-14, 1e-9),
    torch.float32: (40, 1e-6, 3e-6),
    torch.float16: (40, 3e-3, 1e-4),
    torch.bfloat16: (40, 3e-3, 1e-4),
}
# (queries, keys, warps, stages, by the bulk copy engine?) of the 16-bit types for head dims up to 64, 128, 256
HALF = {
    "forward_online": ((64, 128, 4, 3, False), (128, 128, 8, 3, True), (64, 64, 4, 2, False)),
    "forward_lesser": ((64, 64, 4, 3, False), (64, 64, 4, 3, False), (64, 64, 4, 2, False)),
    "forward_threshold": ((128, 64, 4, 3, False), (128, 64, 8, 3, False), (64, 64, 8, 2, False)),
    "backward_dq": ((64, 64, 4, 3, False), (128, 64, 8, 3, False), (64, 32, 8, 1, False)),
    "backward_dkv": ((64, 64, 4, 2, True), (64, 64, 4, 2, True), (32, 64, 8, 1, False)),
    "backward_bias": ((64, 64, 4, 1, False), (64, 64, 4, 1, False), (32, 32, 4, 1, False)),
}
DOUBLE = {"backward_dq": (64, 64, 4, 2, True)}  # heads of 65 to 128 and a threshold map, which takes two sums for dq
# heads up to 128 where that engine cannot read the inputs
PLAIN = {"backward_dq": (128, 64, 8, 3, False), "backward_dkv": (64, 128, 8, 2, False)}
DECODE = (128, 4, 3, False), (64, 4, 3, False), (32, 4, 2, False)  # the same without the queries
TYPES = {torch.float64: tl.float64, torch.float32: tl.float32}


def forward(problem: Problem, o: torch.Tensor | None = None) -> Forward:
    """o, the rows' state and statistics of one call; see `regard.problem`. `o` is room for the output, in any order."""
    p = problem
    if p.sink is not None and not (p.choice.family == "ratio" and p.choice.exponential):
        raise ValueError(f"sink joins Σ exp(s), which {p.choice.name!r} has not; use softmax or softmax1, or drop sink")
    shape, like = p.q.shape[:-1], dict(dtype=p.accumulator, device=p.q.device)
    o = torch.empty(*shape, p.v.shape[-1], dtype=p.q.dtype, device=p.q.device) if o is None else o
    frame, z = torch.empty(shape, **like), torch.empty(shape, **like)
    stats = torch.empty(len(p.stats), *shape, **like)
    if p.k.shape[-2] == 0:
        return _unseeing(p, o, frame, z, stats)
    if o.numel() == 0 and frame.numel() == 0:
        return Forward(o, frame, z, stats)
    if decode.suits(p):
        config, how = _config(p, "forward_decode")
        inputs, outputs = (view(p.q), view(p.k), view(p.v)), (view(o), frame, z, stats)
        decode.forward(p, inputs, _key_blocks(p, config), outputs, _options(p), config, how)
        return Forward(o, frame, z, stats)
    if hopper.takes(p):
        hopper.forward(p, o, frame, z, stats, _options(p), lambda rough: _look_again(p, rough, stats))
        return Forward(o, frame, z, stats)
    kernel = forward_threshold if p.choice.family == "threshold" else forward_online
    kind, opt = kind_of(p), _options(p)
    config, how = _config(p, kernel.__name__)
    blocks = triton.cdiv(shape[-1], config.BM) * shape[0] * shape[1]
    arguments = (
        view(p.q),
        view(p.k),
        view(p.v),
        *_key_blocks(p, config),
        view(o),
        frame,
        z,
        stats,
    )
    if kernel is forward_threshold:
        steps, square, other = SOLVER[p.q.dtype]
        failed = None
        if sparse.takes(p, "forward"):
            views = arguments[:3]
            failed = sparse.forward(p, kind, views, view(o), frame, z, stats, opt, config, steps)
        arguments, constants = (*arguments, failed, opt), (config, steps, square if p.choice.order == 2 else other)
    else:
        arguments, constants = (*arguments, opt), (config,)
    launch(kind, kernel, blocks, arguments, constants, **how)
    return Forward(o, frame, z, stats)


def _look_again(p: Problem, rough: torch.Tensor, stats: torch.Tensor) -> None:
    config, how = _config(p, "forward_lesser")
    rows, many = p.q.shape[0] * p.q.shape[1] * p.q.shape[2], 8
    programs = triton.cdiv(triton.cdiv(p.q.shape[-2], config.BM) * p.q.shape[0] * p.q.shape[1], many)
    arguments = (view(p.q), view(p.k), view(p.v), *_key_blocks(p, config), rough, stats, rows, _options(p), config)
    forward_lesser[(programs,)](*arguments, many, **how)


def backward(problem: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Gradients of q, k, v and of what `upstream` asks for; see `regard.problem`."""
    p, do = problem, upstream.o
    shape, like = p.q.shape[:-1], dict(dtype=p.accumulator, device=p.q.device)
    grads = Gradients(torch.empty_like(p.q), torch.empty_like(p.k), torch.empty_like(p.v))
    heat = torch.empty(shape, **like) if upstream.temperature and p.temperature is not None else None
    if forward.frame.numel() == 0 or p.k.shape[-2] == 0:
        return _nothing_flows(p, upstream, grads, like)
    kind = kind_of(p, do, forward.o, forward.frame, forward.z)
    opt, rows = _options(p), shape[0] * shape[1]
    tilted, family = bool(upstream.stats), p.choice.family
    # where 16 bits cannot tell, 1/Z joins the exponent of exp(s − m)/Z
    folded = family == "ratio" and p.choice.exponential and p.q.element_size() == 2 and not tilted
    frame = forward.frame if family == "threshold" else torch.empty(shape, **like)
    inverse = torch.empty(shape, **like) if (not folded if family == "ratio" else tilted) else None
    product = delta = torch.empty(shape, **like)
    state = State(frame, inverse, delta, None, None, None)
    inputs = view(p.q), view(p.k), view(p.v), view(do)
    if tilted:
        config, how = _config(p, "backward_rows")
        arguments = inputs[0], view(forward.o), inputs[3], forward.frame, forward.z, state, opt
        launch(kind, backward_rows, triton.cdiv(shape[-1], config.BM) * rows, arguments, (config,), **how)
        product = delta.clone()
        state = state._replace(**_tilt(p, forward, upstream, delta))
    flags = dict(TILTED=tilted, HEAT=heat is not None, FOLDED=folded, others=(do,))
    config, how = _config(p, "backward_dq", **flags)
    blocks = triton.cdiv(shape[-1], config.BM) * rows
    left = None, None
    if sparse.takes(p, "backward") and heat is None and not tilted:
        outputs = view(grads.q), view(grads.k), view(grads.v)
        left = sparse.backward(p, kind, inputs, forward.frame, forward.z, outputs, delta, opt, config)
    left = iter(left)
    queries = view(forward.o), inputs[3], view(grads.q), heat, forward.frame, forward.z, state
    arguments = *inputs[:3], *_key_blocks(p, config), *queries, next(left), opt
    launch(kind, backward_dq, blocks, arguments, (config,), **how)
    config, how = _config(p, "backward_dkv", **flags)
    queries = (described(x, config.BM, w, config.BULK) for x, w in ((p.q, config.BD), (do, config.BE)))
    blocks = triton.cdiv(p.k.shape[-2], config.BN) * p.k.shape[0] * p.k.shape[1]
    outputs = view(grads.k), view(grads.v)
    arguments = *inputs, *queries, *outputs, state, next(left), opt
    launch(kind, backward_dkv, blocks, arguments, (config,), **how)
    if upstream.bias and p.bias is not None:
        grads.bias = _bias_gradient(p, inputs, state, opt, *_config(p, "backward_bias", **flags))
    grads.temperature = heat
    if upstream.sink and p.sink is not None:
        share = torch.exp(p.sink.to(delta.dtype) - forward.frame) / forward.z
        through = upstream.stats.get("logsumexp", 0.0) - product
        grads.sink = torch.where(forward.z > 0, share * through, 0.0)
    return grads


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
        a = p.scale if _linear(p) else 1.0
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


def _unseeing(p: Problem, o, frame, z, stats) -> Forward:
    for tensor in (o, frame, z, stats):
        tensor.zero_()
    for row, name in zip(stats, p.stats, strict=True):
        if name in ("max_logit", "logsumexp"):
            row.fill_(float("-inf"))
    return Forward(o, frame, z, stats)


def view(tensor: torch.Tensor | None) -> View:
    return View(None, (0, 0, 0, 0)) if tensor is None else View(tensor, tensor.stride())


def described(tensor: torch.Tensor, rows: int, width: int, bulk: bool) -> TensorDescriptor | torch.Tensor:
    """Blocks [rows, width] for Hopper's bulk copy engine, if `bulk`; otherwise something that no kernel looks at."""
    if not bulk:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, width])


def _key_blocks(p: Problem, config: Config) -> tuple:
    return tuple(described(x, config.BN, w, config.BULK) for x, w in ((p.k, config.BD), (p.v, config.BE)))


def bulky(*tensors: torch.Tensor) -> bool:
    """Can the bulk copy engine read these?"""
    if torch.cuda.get_device_capability(tensors[0].device)[0] < 9:
        return False
    for tensor in tensors:
        steps = (tensor.element_size() * stride for stride in tensor.stride()[:-1])
        if tensor.stride(-1) != 1 or tensor.data_ptr() % 16 or any(step <= 0 or step % 16 for step in steps):
            return False
    return True


def pair(number: float | None) -> tuple[float, float]:
    """A Python float as two float32 numbers: a kernel argument has no more bits."""
    number = 0.0 if number is None else float(number)
    high = float(np.float32(number))
    return high, float(np.float32(number - high))


def _limit(reach: int | None, most: int) -> int | None:
    return None if reach is None else max(-most, min(reach, most))


def _options(p: Problem) -> Options:
    (left, right), (_, heads, m, _), n = p.reach, p.q.shape, p.k.shape[-2]
    dropout = p.dropout_p > 0.0
    return Options(
        bias=view(p.bias),
        mask=view(None if p.mask is None else p.mask.view(torch.uint8)),
        temperature=view(p.temperature),
        sink=view(p.sink),
        lengths=None if p.key_lengths is None else p.key_lengths.contiguous(),
        seed=p.seed if dropout else None,
        left=_limit(left, m + n),
        right=_limit(right, m + n),
        scale=pair(p.scale),
        cap=None if p.softcap is None else pair(p.softcap),
        theta=pair(p.choice.theta),
        dropped=philox.threshold(p.dropout_p) if dropout else None,
        kept=pair(1.0 / (1.0 - p.dropout_p)),
        heads=heads,
        group=heads // p.k.shape[1],
        queries=m,
        keys=n,
        ahead=p.first_query or None,
    )


def _linear(p: Problem) -> bool:
    """Is s a positive multiple of q·k? Then the maximum can be taken before scaling."""
    return p.softcap is None and p.bias is None and p.scale > 0


def _config(
    p: Problem, kernel: str, TILTED: bool = False, HEAT: bool = False, FOLDED: bool = False, others=()
) -> tuple[Config, dict]:
    """What a kernel is compiled for, and its launch options."""
    forwards = kernel.startswith("forward")
    stats = p.stats if forwards else ()
    dense = p.bias is not None or p.mask is not None
    right = p.reach[1]
    d, e = p.q.shape[-1], p.v.shape[-1]
    m, n, bulk, how = _blocks(p, kernel, others)
    config = Config(
        F=bundle.of(p.choice),
        NEED=statistics.needs(stats, p.choice, dense),
        SLOT=statistics.slots(stats),
        SPARSE=p.choice.sparse,
        LINEAR=_linear(p),
        BEHIND=right is not None and right <= 0,
        TILTED=TILTED,
        HEAT=HEAT,
        FOLDED=FOLDED,
        ACC=TYPES[p.accumulator],
        PRECISION="tf32x3" if p.q.dtype == torch.float32 else "ieee",
        WIDEN=p.q.dtype == torch.bfloat16 and not p.q.is_cuda,
        D=d,
        E=e,
        BD=max(32, triton.next_power_of_2(d)),
        BE=max(32, triton.next_power_of_2(e)),
        BM=m,
        BN=n,
        BULK=bulk,
        LANES=min(n, 32 if m < 64 else 8) if kernel == "forward_decode" else 8,  # few rows: warps lie along the keys
    )
    return config, how


def _blocks(p: Problem, kernel: str, others: tuple = ()) -> tuple[int, int, bool, dict]:
    """(queries, keys) per block, whether by bulk copies, and the launch options: what was fastest on an H200."""
    width = max(p.q.shape[-1], p.v.shape[-1])
    size = 0 if width <= 64 else 1 if width <= 128 else 2
    simple = p.choice.family == "ratio" and p.choice.exponential
    if not p.q.is_cuda or p.q.dtype == torch.float64:
        m, n, warps, stages, bulk = 16, 16, 4, 1, False
    elif kernel == "backward_rows":
        m, n, warps, stages, bulk = 64, 64, 4, 1, False
    elif p.q.dtype == torch.float32:
        (m, n), warps, stages, bulk = ((64, 32), (32, 32), (16, 16))[size], 4, 1, False
    elif kernel == "forward_decode":
        m, n, warps, stages, bulk = decode.rows_per_program(p), *DECODE[size]
    else:
        m, n, warps, stages, bulk = HALF[kernel][size]
        if size == 1 and p.choice.family == "threshold":
            m, n, warps, stages, bulk = DOUBLE.get(kernel, (m, n, warps, stages, bulk))
        if bulk and not bulky(p.q, p.k, p.v, *others):
            m, n, warps, stages, bulk = PLAIN.get(kernel, (m, n, warps, stages, False))
        measured = p.stats and not simple and size < 2 and kernel.startswith("forward")
        if p.bias is not None or p.mask is not None or p.dropout_p > 0.0 or measured:
            m, n, warps, stages, bulk = min(m, 64), min(n, 32), 4, min(stages, 2), False  # more registers per score
    return m, n, bulk, dict(num_warps=warps, num_stages=stages)
