"""Attention: validate, choose the path, call it. Nothing here touches N × N."""

from __future__ import annotations

import math
import numbers
import operator
import os
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from regard import _dtensor, _ops, normalizers, reference, statistics
from regard._normalize import check_flag, transformed
from regard.problem import Problem
from regard.scores import resolve_scale
from regard.statistics import DIFFERENTIABLE, Statistics
from regard.temperature import Rows, visible_keys

BACKENDS = ("torch", "cpu", "triton", "reference")
HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Path:
    """Which backend a call takes, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


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
    normalizer: str = "softmax",
    temperature=None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    return_stats: bool | str | tuple[str, ...] = False,
    backend: str | None = None,
):
    """o_i = Σ_j p_ij·v_j, p_i = normaliser((cap(scale·q_i·k_j) + bias_ij) / T): torch's signature, then ours.

    >>> import regard, torch
    >>> q = k = v = torch.eye(4).reshape(1, 1, 4, 4)
    >>> out, stats = regard.attention(q, k, v, is_causal=True, return_stats=True)
    >>> stats.visible_keys
    tensor([[[1., 2., 3., 4.]]])

    Args:
        q, k, v: (…, Hq, Lq, D), (…, Hk, Lk, D), (…, Hk, Lk, Dv). Hk may divide Hq with `enable_gqa`.
        attn_mask: bool (True = visible) or additive float, broadcastable to (…, Lq, Lk).
        dropout_p: probability of dropping a weight, reproducible from torch's seed.
        is_causal: query i sees keys ≤ i, aligned at the top left as in torch.
        scale: None (1/√D), a number, "sqrt", "inverse", "none", or a tensor per head.
        normalizer: a name, e.g. "entmax15", "entmax(alpha=1.25)", "sigmoid(bias=-3)".
        temperature: a positive number, a tensor that broadcasts to (…, Hq, Lq, 1), or a policy of `regard.temperature`.
        softcap: c in c·tanh(x/c), before bias and temperature.
        sink: a logit per head that joins the denominator after the temperature; softmax and softmax1 only.
        window: (left, right), None for no limit: query i sees keys i − left … i + right.
        key_lengths: (B,) ints: keys from key_lengths[b] on are hidden.
        return_stats: True for all statistics, or names; the result is then (out, stats).
        backend: "torch", "cpu", "triton" or "reference"; None lets `regard.attention_path` choose.
    """
    if any(map(_dtensor.is_dtensor, (q, k, v))):
        options = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, window=window,
                       enable_gqa=enable_gqa, normalizer=normalizer, temperature=temperature, softcap=softcap,
                       sink=sink, key_lengths=key_lengths, return_stats=return_stats, backend=backend)  # fmt: skip
        return _dtensor.attention(attention, q, k, v, options)
    call = _Call.of(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, sink, window,
        key_lengths, return_stats, backend,
    )  # fmt: skip
    out, stats = _RUN[call.path.backend](call)
    out = out.reshape(*call.lead, *out.shape[-2:])
    if not call.wanted:
        return out
    return out, Statistics({name: stats[name].reshape(out.shape[:-1]) for name in call.wanted})


def attention_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | str | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    normalizer: str = "softmax",
    temperature=None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    return_stats: bool | str | tuple[str, ...] = False,
    backend: str | None = None,
) -> Path:
    """Which backend `regard.attention` takes for these arguments, and why; nothing is computed.

    >>> import regard, torch
    >>> q = k = v = torch.randn(1, 2, 8, 4)
    >>> print(regard.attention_path(q, k, v))
    torch: plain softmax without statistics: torch's own fused kernels
    >>> regard.attention_path(q, k, v, return_stats=True).backend
    'cpu'
    """
    call = _Call.of(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, sink, window,
        key_lengths, return_stats, backend,
    )  # fmt: skip
    if call.path.backend == "triton" and _on_warpgroups(call.problem):
        return replace(call.path, reason=call.path.reason + ", in Hopper's warpgroups")
    return call.path


def _on_warpgroups(problem: Problem) -> bool:
    """Does the Hopper kernel take this call?"""
    from regard.kernels import hopper

    return hopper.takes(problem)


# validation -------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """The arguments checked and brought to [B, H, M, D]."""

    problem: Problem
    bias: Tensor | None  # as given, 4-dim, not expanded
    mask: Tensor | None
    temperature: Tensor | None  # 3-dim, not expanded
    sink: Tensor | None
    policy: object | None
    wanted: tuple[str, ...]
    lead: tuple[int, ...]  # (…, H)
    path: Path

    @classmethod
    def of(
        cls, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, sink,
        window, key_lengths, return_stats, backend,
    ) -> _Call:  # fmt: skip
        wanted = statistics.resolve(return_stats)
        choice = normalizers.get(normalizer)
        if choice.name == "entmax" and choice.theta == 1.0:
            choice = normalizers.get("softmax")
        _check_tensors(q, k, v)
        rank = max(q.ndim, k.ndim, v.ndim)
        q, k, v = (x[(None,) * (rank - x.ndim)] for x in (q, k, v))
        q, k, v, attn_mask = _autocast(q, k, v, attn_mask)
        if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p!r}")
        if dropout_p and wanted:
            raise ValueError(
                "return_stats with dropout_p > 0 is undefined: statistics describe the weights used, and dropout uses "
                "a random part of them; measure with dropout_p=0.0 (evaluation mode)"
            )
        is_causal, enable_gqa = check_flag(is_causal, "is_causal"), check_flag(enable_gqa, "enable_gqa")
        if is_causal and attn_mask is not None:
            raise ValueError("attn_mask and is_causal=True cannot go together; fold the causal order into attn_mask")
        if enable_gqa and rank > 2 and k.shape[-3] != v.shape[-3]:
            k, v = _to_query_heads(k, "k", q), _to_query_heads(v, "v", q)
        lead, batch, heads, kv_heads = _leading(q, k, v, enable_gqa, key_lengths, sink)
        queries, keys = q.shape[-2], k.shape[-2]
        q = q.expand(*lead, *q.shape[-2:]).reshape(batch, heads, *q.shape[-2:])
        kv_lead = (*lead[:-1], kv_heads) if lead else ()
        k, v = (x.expand(*kv_lead, *x.shape[-2:]).reshape(batch, kv_heads, *x.shape[-2:]) for x in (k, v))
        scale = resolve_scale(scale, q.shape[-1])
        if isinstance(scale, Tensor):
            q, scale = _scaled(q, scale, heads), 1.0
        bias = mask = None
        if attn_mask is not None:
            shaped = _check_mask(attn_mask, lead, batch, heads, queries, keys, q)
            bias, mask = (None, shaped) if shaped.dtype == torch.bool else (shaped, None)
        left, right = check_window(window)
        number = isinstance(softcap, numbers.Real) and not isinstance(softcap, bool)
        if softcap is not None and not (number and 0 < softcap < math.inf):
            raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
        policy = None
        if callable(temperature) and not isinstance(temperature, Tensor):
            settled = getattr(temperature, "value", None)  # of a policy that asks nothing of the rows
            policy, temperature = (temperature, None) if settled is None else (None, settled)
        number, tensor = _check_temperature(temperature, lead, batch, heads, queries, q)
        if number != 1.0:
            if softcap is None and bias is None:
                scale = scale / number
            else:
                tensor = q.new_full((1, 1, 1), number, dtype=_ops.accumulator(q.dtype))
        problem = Problem(
            q=q,
            k=k,
            v=v,
            choice=choice,
            scale=scale,
            softcap=None if softcap is None else float(softcap),
            bias=None if bias is None else bias.expand(batch, heads, queries, keys),
            mask=None if mask is None else mask.expand(batch, heads, queries, keys),
            temperature=None if tensor is None else tensor.expand(batch, heads, queries),
            key_lengths=_check_lengths(key_lengths, batch, keys, q),
            causal=bool(is_causal),
            left=left,
            right=right,
            dropout_p=float(dropout_p),
            stats=wanted,
        )
        sink = _check_sink(sink, choice, heads, lead, batch, queries, q)
        problem.sink = None if sink is None else sink.expand(batch, heads, queries)
        path = _choose(problem, policy, backend)
        return cls(problem, bias, mask, tensor, sink, policy, wanted, lead, path)


def _check_tensors(q, k, v) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}; convert with .to_dense()")
        if not x.is_floating_point() or x.dtype.itemsize == 1:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}; convert with .float()"
            )
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dims (…, length, head_dim), got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got {q.device} for q and {x.device} for {name}")
        if x.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype} for q and {x.dtype} for {name}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same length, got {k.shape[-2]} and {v.shape[-2]}")


def _autocast(q, k, v, attn_mask):
    """Under autocast q, k, v and a float mask take its dtype, as torch's sdpa does; float64 stays."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v, attn_mask
    dtype = torch.get_autocast_dtype(kind)

    def cast(x):
        return x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v), cast(attn_mask)


def _leading(q, k, v, enable_gqa, key_lengths, sink):
    """((…, H), B, H, G): leading dims broadcast; the last of them is the heads."""
    if q.ndim == 2:
        return (), 1, 1, 1
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != kv_heads:
        if 1 not in (kv_heads, v.shape[-3]):
            raise ValueError(f"k and v must have the same number of heads, got {kv_heads} and {v.shape[-3]}")
        kv_heads = kv_heads * v.shape[-3]
    if enable_gqa:
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"the heads of q ({heads}) must be a multiple of those of k and v ({kv_heads})")
    elif heads != kv_heads and 1 not in (heads, kv_heads):
        hint = "; pass enable_gqa=True for grouped queries" if kv_heads and heads % kv_heads == 0 else ""
        raise ValueError(f"q has {heads} heads and k has {kv_heads}: they do not fit{hint}")
    if not enable_gqa:
        heads = max(heads, kv_heads) if 0 not in (heads, kv_heads) else 0
        kv_heads = heads
    try:
        outer = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ValueError(
            f"the leading dims of q, k and v must broadcast, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        ) from None
    lead = (*outer, heads)
    if q.ndim == 3 and key_lengths is not None and sink is None and not enable_gqa:
        return lead, heads, 1, 1  # (N, L, D): torch's N is a batch, which key_lengths counts
    return lead, math.prod(outer), heads, kv_heads


def _to_query_heads(x: Tensor, name: str, q: Tensor) -> Tensor:
    """Each head as often as it has queries: for keys and values that are grouped differently."""
    heads, own = q.shape[-3], x.shape[-3]
    if own == 0 or heads % own:
        raise ValueError(f"the heads of q ({heads}) must be a multiple of those of {name} ({own})")
    return x.repeat_interleave(heads // own, -3)


def _scaled(q: Tensor, scale: Tensor, heads: int) -> Tensor:
    if not scale.is_floating_point():
        raise TypeError(f"scale must be a floating-point tensor, got {scale.dtype}")
    if scale.ndim > 1 or (scale.ndim == 1 and scale.shape[0] not in (1, heads)):
        raise ValueError(f"scale must be a number or have shape ({heads},), one per head, got {tuple(scale.shape)}")
    column = scale if scale.ndim == 0 else scale[:, None, None]
    return (q * column.to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)


def _check_mask(mask, lead, batch, heads, queries, keys, q) -> Tensor:
    """4-dim, broadcastable to [B, H, M, N], not expanded where it need not be."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool (True = visible) or floating-point (added), got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {mask.device}")
    full = (*lead, queries, keys)
    try:
        fits = torch.broadcast_shapes(mask.shape, full) == torch.Size(full)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"attn_mask must broadcast to {full}, got {tuple(mask.shape)}")
    while mask.ndim < len(full):
        mask = mask[None]
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded by the caller: one copy is enough, and its gradient the sum
            mask = mask.narrow(dim, 0, 1)
    inner = mask.shape[-2:]
    outer = mask.shape[:-2]
    if len(lead) == 2:
        return mask
    if len(lead) < 2:
        mask = mask.reshape(*(1,) * (2 - len(lead)), *outer, *inner)
        return mask.transpose(0, 1) if len(lead) == 1 and heads == 1 and batch != 1 else mask
    if all(size == 1 for size in outer[:-1]):
        return mask.reshape(1, outer[-1], *inner)
    return mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(batch, outer[-1], *inner)


def check_window(window) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), each a number of keys or None, got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(f"window's sides must be ints ≥ 0 or None, got {window!r}")
    return window[0], window[1]


def _check_temperature(temperature, lead, batch, heads, queries, q) -> tuple[float, Tensor | None]:
    """(number, None) or (1, tensor of 3 dims that broadcasts to [B, H, M])."""
    if temperature is None:
        return 1.0, None
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
            raise TypeError(f"temperature must be a number, a tensor or a policy, got {type(temperature).__name__}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite in attention, got {temperature!r}")
        return float(temperature), None
    if not temperature.is_floating_point() or temperature.layout != torch.strided:
        raise TypeError(f"temperature must be floating-point and dense, got {temperature.dtype}, {temperature.layout}")
    if temperature.device.type == "cpu" and not torch.compiler.is_compiling() and not _mapped(temperature):
        values = temperature.detach()
        if not bool(((values > 0) & (values < math.inf)).all()):
            raise ValueError("temperature must be positive and finite; the tensor has other entries")
    temperature = temperature.to(q.device)
    wide = temperature.to(_ops.accumulator(q.dtype))
    return 1.0, _per_row(wide, "temperature", lead, batch, heads, queries)


def _per_row(x: Tensor, name: str, lead, batch, heads, queries) -> Tensor:
    full = (*lead, queries, 1)
    try:
        fits = torch.broadcast_shapes(x.shape, full) == torch.Size(full)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must broadcast to {full}, got {tuple(x.shape)}")
    while x.ndim < len(full):
        x = x[None]
    x = x.squeeze(-1)  # (…, H, M)
    if len(lead) == 2:
        return x
    return x.expand(*lead, x.shape[-1]).reshape(batch, heads, x.shape[-1])


def _mapped(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _check_lengths(key_lengths, batch: int, keys: int, q: Tensor) -> Tensor | None:
    if key_lengths is None:
        return None
    if not isinstance(key_lengths, Tensor):
        try:
            key_lengths = torch.tensor([operator.index(length) for length in key_lengths], dtype=torch.int64)
        except TypeError:
            raise TypeError(f"key_lengths must be ints, one per batch entry, got {key_lengths!r}") from None
    if key_lengths.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"key_lengths must be integers, got {key_lengths.dtype}")
    if key_lengths.ndim != 1 or key_lengths.shape[0] != batch:
        raise ValueError(f"key_lengths must have shape ({batch},), one per batch entry, got {tuple(key_lengths.shape)}")
    if key_lengths.device.type == "cpu" and not torch.compiler.is_compiling() and not _mapped(key_lengths):
        if key_lengths.numel() and not bool(((key_lengths >= 0) & (key_lengths <= keys)).all()):
            raise ValueError(f"key_lengths must lie in [0, {keys}], got {key_lengths.tolist()[:8]}")
    return key_lengths.to(q.device, torch.int32)


def _check_sink(sink, choice, heads, lead, batch, queries, q) -> Tensor | None:
    if sink is None:
        return None
    if isinstance(sink, (int, float)) and not isinstance(sink, bool):
        sink = q.new_tensor([float(sink)])
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise TypeError("sink must be a number or a floating-point tensor with one logit per head")
    if choice.family != "ratio" or not choice.exponential:
        raise ValueError(f"sink joins the denominator of 'softmax' or 'softmax1', not of {choice.name!r}; drop one")
    wide = sink.to(q.device, _ops.accumulator(q.dtype))
    if sink.ndim <= 1:
        if sink.numel() not in (1, heads):
            raise ValueError(f"sink must have one logit per head ({heads}), got {sink.numel()}")
        return wide.reshape(1, -1, 1)
    return _per_row(wide, "sink", lead, batch, heads, queries)


# the choice of path -----------------------------------------------------------------------------------------------


def _choose(problem: Problem, policy, backend: str | None) -> Path:
    device = problem.q.device.type
    obstacle = _not_for_torch(problem, policy)
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None, got {backend!r}")
        _check_backend(backend, problem, obstacle)
        return Path(backend, "asked for by backend=")
    if not problem.choice.fused or (problem.choice.name == "entmax" and problem.choice.theta > 2.0):
        return Path("reference", f"{problem.choice.spec} has no fused form")
    if obstacle is not None and any(transformed(x) for x in (problem.q, problem.k, problem.v)):
        return Path("reference", "a torch.func transform that the fused ops cannot carry (jvp, or vmap of a gradient)")
    if obstacle is None:
        hopper = device == "cuda" and _is_hopper(problem.q.device)
        kernels = "torch's own fused kernels" + (", cuDNN's first" if hopper else "")
        return Path("torch", f"plain softmax without statistics: {kernels}")
    if device == "cpu":
        return Path("cpu", f"{obstacle}: blocked over queries, BLAS and fused rows")
    if device == "cuda":
        if problem.q.dtype == torch.float64:
            return Path("reference", f"{obstacle}, in float64, which the GPU kernels do not take")
        return Path("triton", f"{obstacle}: fused GPU kernel")
    return Path("reference", f"{obstacle}, and there is no fused kernel for device {device!r}")


def _not_for_torch(problem: Problem, policy) -> str | None:
    """Why torch's sdpa cannot do this, in a few words; None if it can."""
    if problem.choice.name != "softmax":
        return f"normalizer {problem.choice.spec!r}"
    for given, what in (
        (problem.stats, "statistics"),
        (problem.softcap, "a soft cap"),
        (problem.sink is not None, "a sink"),
        (problem.left is not None or problem.right is not None, "a window"),
        (problem.temperature is not None or policy is not None, "a temperature per query"),
        (problem.key_lengths is not None and problem.causal, "key lengths beside causal order"),
        (problem.key_lengths is not None and problem.bias is not None, "key lengths beside a bias"),
    ):
        if given:
            return what
    return None


def _check_backend(backend: str, problem: Problem, obstacle: str | None) -> None:
    device = problem.q.device.type
    if backend == "torch" and obstacle is not None:
        raise ValueError(f"backend 'torch' cannot compute {obstacle}; use backend=None, 'cpu', 'triton' or 'reference'")
    if backend == "cpu" and device != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU, got {device}")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device != "cuda" and not interpreted:
        raise ValueError(f"backend 'triton' needs tensors on a CUDA device (or TRITON_INTERPRET=1), got {device}")
    if backend in ("cpu", "triton"):
        if not problem.choice.fused or (problem.choice.name == "entmax" and problem.choice.theta > 2.0):
            raise ValueError(f"backend {backend!r} has no fused {problem.choice.spec!r}; use backend='reference'")
        if backend == "triton" and problem.q.dtype == torch.float64 and not interpreted:
            raise ValueError("backend 'triton' takes float32, bfloat16 and float16, got float64; use 'reference'")


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


# the paths --------------------------------------------------------------------------------------------------------


def _run_torch(call: _Call):
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
        if mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    options = dict(attn_mask=mask, dropout_p=problem.dropout_p, is_causal=problem.causal, scale=problem.scale)
    options["enable_gqa"] = grouped
    if q.device.type == "cuda" and _is_hopper(q.device):
        with sdpa_kernel(HOPPER_ORDER, set_priority=True):
            out = scaled_dot_product_attention(q, k, v, **options)
    else:
        out = scaled_dot_product_attention(q, k, v, **options)
    return (out if dead is None else out.masked_fill(dead, 0.0)), {}


def _seeded(problem: Problem) -> Tensor | None:
    if not problem.dropout_p:
        return None
    return torch.randint(0, 2**62, (1,), device=problem.q.device, dtype=torch.int64)


def _with_policy(call: _Call) -> _Call:
    """Ask the temperature policy, if there is one, for its tensor."""
    if call.policy is None:
        return call

    def measure(names):
        plain = replace(call.problem, stats=statistics.resolve(names), dropout_p=0.0)
        return _RUN[call.path.backend](replace(call, problem=plain, policy=None, wanted=plain.stats))[1]

    asked = _check_asked(call.policy(visible_keys(call.problem), Rows(call.problem.q, measure)), call)
    problem = replace(call.problem, temperature=asked.expand(call.problem.q.shape[:3]))
    return replace(call, problem=problem, temperature=asked, policy=None)


def _check_asked(asked, call: _Call) -> Tensor:
    """What a policy gave, as a tensor of 3 dims that broadcasts to [B, H, M]."""
    rows, policy = call.problem.q.shape[:3], type(call.policy).__name__
    if not isinstance(asked, Tensor) or not asked.is_floating_point():
        raise TypeError(f"temperature: the policy {policy} must return a floating-point tensor, got {asked!r}")
    try:
        fits = torch.broadcast_shapes(asked.shape, rows) == rows
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"temperature: what the policy {policy} returns must broadcast to (B, H, M) = {tuple(rows)}, got shape "
            f"{tuple(asked.shape)}"
        )
    asked = asked.to(call.problem.q.device, call.problem.accumulator)
    return asked.reshape(*(1,) * (3 - asked.ndim), *asked.shape)


def _run_fused(call: _Call):
    call = _with_policy(call)
    problem = call.problem
    names = _with_what_backward_needs(call)
    left, right = (-1 if side is None else side for side in (problem.left, problem.right))
    o, _, _, values = _ops.attention(
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
    return o, _marked(problem, {name: values[index] for index, name in enumerate(names)})


def _with_what_backward_needs(call: _Call) -> tuple[str, ...]:
    """The statistics' gradients are made of a few more statistics; they ride along when a gradient is possible."""
    names = call.problem.stats
    if not torch.is_grad_enabled() or not _softmax_family(call.problem) or not set(names) & set(DIFFERENTIABLE):
        return names
    return statistics.resolve((*names, "visible_keys", "mean_logit", "logsumexp", "mass", "entropy"))


def _softmax_family(problem: Problem) -> bool:
    return problem.choice.family == "ratio" and problem.choice.exponential


def _marked(problem: Problem, stats: dict[str, Tensor]) -> dict[str, Tensor]:
    """Only entropy, logsumexp and logit_variance of the softmax family carry gradients; the others are detached."""
    carries = DIFFERENTIABLE if _softmax_family(problem) else ()
    return {name: x if name in carries else x.detach() for name, x in stats.items()}


def _run_reference(call: _Call):
    call = _with_policy(call)
    problem = replace(call.problem, seed=_seeded(call.problem))
    if any(transformed(x) for x in (problem.q, problem.k, problem.v)):
        out, stacked = reference.of_whole(problem)  # checkpoints do not go through transforms
    else:
        out, stacked = reference.of_problem(problem)
    stats = {name: x.to(problem.accumulator) for name, x in zip(problem.stats, stacked, strict=False)}
    return out.to(problem.q.dtype), _marked(problem, stats)


_RUN = {"torch": _run_torch, "cpu": _run_fused, "triton": _run_fused, "reference": _run_reference}
