"""`regard.attention` and `regard.attention_path`: a plan for a call seen before, else prepare, dispatch and execute.

No path but the reference builds an N × N tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard._core import dtensor
from regard._core.derivatives.transforms import attend_duals
from regard._core.dispatch import Path, describe_kernel
from regard._core.execute import execute
from regard._core.gate import gate_result
from regard._core.ops.backends import is_plain_eager
from regard._core.options import AttentionOptions, AttnMask, Temperature, Wanted, Window
from regard._core.plans import keep_plan, keep_setting, plan_duals, plan_key, plans, settings
from regard._core.prepare import prepare
from regard.normalizers import Choice
from regard.score_function import ScoreFunction
from regard.statistics import Statistics

__all__ = ["Path", "attention", "attention_path"]

TORCH_NAMES = (("query", "q"), ("key", "k"), ("value", "v"))
OTHER_NAMES = (  # what other libraries, and British English, call our arguments
    ("causal", "is_causal"), ("mask", "attn_mask"), ("normaliser", "normalizer"), ("soft_cap", "softcap"),
    ("logits_soft_cap", "softcap"), ("window_size", "window"), ("sliding_window", "window"), ("stats", "return_stats"),
)  # fmt: skip
Function = TypeVar("Function", bound=Callable)


def knows_other_names(function: Function) -> Function:
    """Lets q, k and v also be named query, key and value, as in torch; other libraries' names raise and give ours."""
    name, known = function.__qualname__.removesuffix(".__init__"), signature(function).parameters
    torch_names, other_names = ([pair for pair in pairs if pair[1] in known] for pairs in (TORCH_NAMES, OTHER_NAMES))

    @wraps(function)
    def named(*args, **kwargs):
        for theirs, ours in torch_names:
            if theirs in kwargs:
                if ours in kwargs:
                    raise TypeError(f"{name} got both {ours} and {theirs}; give one of them")
                kwargs[ours] = kwargs.pop(theirs)
        for theirs, ours in other_names:
            if theirs in kwargs:
                hint = "=(sliding_window − 1, 0)" if theirs == "sliding_window" else ""
                raise TypeError(f"{name} has no argument {theirs!r}; it is called {ours!r} here{hint}")
        return function(*args, **kwargs)

    return cast(Function, named)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: AttnMask = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | str | Tensor | None = ...,
    enable_gqa: bool = ...,
    *,
    normalizer: str | Choice = ...,
    temperature: Temperature = ...,
    softcap: float | None = ...,
    score_mod: ScoreFunction | None = ...,
    sink: float | Tensor | None = ...,
    window: Window = ...,
    key_lengths: Tensor | Sequence[int] | None = ...,
    gate: Tensor | None = ...,
    return_stats: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: AttnMask = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | str | Tensor | None = ...,
    enable_gqa: bool = ...,
    *,
    normalizer: str | Choice = ...,
    temperature: Temperature = ...,
    softcap: float | None = ...,
    score_mod: ScoreFunction | None = ...,
    sink: float | Tensor | None = ...,
    window: Window = ...,
    key_lengths: Tensor | Sequence[int] | None = ...,
    gate: Tensor | None = ...,
    return_stats: Literal[True] | str | Sequence[str],
    backend: str | None = ...,
) -> tuple[Tensor, Statistics]: ...


@knows_other_names
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: AttnMask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | str | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    normalizer: str | Choice = "softmax",
    temperature: Temperature = None,
    softcap: float | None = None,
    score_mod: ScoreFunction | None = None,
    sink: float | Tensor | None = None,
    window: Window = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    gate: Tensor | None = None,
    return_stats: Wanted = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Statistics]:
    """o_i = Σ_j p_ij·v_j, p_i = normaliser((cap(scale·q_i·k_j) + bias_ij) / T): torch's signature, then ours.

    >>> import regard, torch
    >>> q = k = v = torch.eye(4).reshape(1, 1, 4, 4)
    >>> out, stats = regard.attention(q, k, v, is_causal=True, return_stats=True)
    >>> stats.visible_keys
    tensor([[[1., 2., 3., 4.]]])

    Args:
        q, k, v: (…, Hq, Lq, D), (…, Hk, Lk, D), (…, Hk, Lk, Dv). Hk may divide Hq with `enable_gqa`. As keywords they
            may also be named query, key and value.
        attn_mask: bool (True = visible) or additive float, broadcastable to (…, Lq, Lk); a `regard.Mask`; a bias of
            `regard.bias`; a pair (mask, bias); or torch's `CausalBias` or `BlockMask`. With `is_causal` both hide.
        dropout_p: probability of dropping a weight, reproducible from torch's seed.
        is_causal: query i sees keys ≤ i, aligned at the top left as in torch.
        scale: None (1/√D), a number, "sqrt", "inverse", "none", or a tensor (Hq,) or (Hq, 1, 1).
        normalizer: a name, e.g. "entmax15", "entmax(alpha=1.25)", "sigmoid(bias=-log(n))"; or what
            `regard.normalizers.get("entmax", alpha=tensor)` returns: the tensor, (Hq,), (…, Hq, Lq) or broadcasting to
            (…, Hq, Lq, 1), receives gradients. On a GPU α outside [1.005, 2] gives NaN there.
        temperature: a positive number, a tensor (Hq,) or one that broadcasts to (…, Hq, Lq, 1), or a policy of
            `regard.temperature`.
            A number must lie between 1e-20 and 1e20. Rows whose logits s/T overflow may be NaN.
        softcap: c in c·tanh(x/c), before bias and temperature.
        score_mod: a `regard.ScoreFunction` f(s, i, j, h, …), which takes the place of the soft cap.
        sink: a logit, or one per head, that joins the denominator after the temperature; softmax and softmax1 only.
        window: (left, right), None for no limit: query i sees keys i − left … i + right.
        key_lengths: (B,) ints: keys from key_lengths[b] on are hidden.
        gate: logits g of an output gate (arXiv 2505.06708), o_i ← σ(g_i)·o_i: one per head, (…, Hq, Lq) or
            (…, Hq, Lq, 1), or one per element, (…, Hq, Lq, Dv). Statistics are those before the gate.
        return_stats: True for all statistics, or a tuple of names, even (); the result is then (out, stats). `entropy`,
            `logsumexp` and `logit_variance` of softmax, softmax1 and sinks carry gradients, the others none.
        backend: "torch", "cpu", "triton" or "reference"; None lets `regard.attention_path` choose.

    Returns:
        The output (…, Hq, Lq, Dv) in q's dtype, or the pair (output, statistics) if `return_stats` is not False; each
            statistic is (…, Hq, Lq), float32, or float64 for float64 inputs.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes do not fit, a number lies outside its range, statistics are asked for beside dropout, or
            the `backend` asked for cannot compute the call.

    With `create_graph=True` gradients have gradients themselves: they come from the float64 reference, block by block,
    exact and slow, or, of plain softmax, from torch's plain products (unless another backward with
    `retain_graph=True` came before), but not with dropout or inside checkpointing.
    """
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, score_mod, sink, window,
        key_lengths, gate, return_stats, backend,
    )  # fmt: skip
    key = plan_key(q, k, v, options) if is_plain_eager() else None
    plan = None if key is None else plans.get(key)
    if plan is not None:
        result = plan(q, k, v)
        return result if gate is None else gate_result(result, gate)
    moving = None
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:  # a compiler would guard on the level
        moving = plan_duals(q, k, v, options)
    if moving is not None and moving[1] in settings:
        return attend_duals(settings[moving[1]], moving[0])
    if any(map(dtensor.is_dtensor, (q, k, v))):
        return dtensor.attention(attention, q, k, v, options)
    call = prepare(q, k, v, options)
    if key is not None and dropout_p != 1.0:  # then v is not the one that came
        keep_plan(key, q, k, v, call)
    if moving is not None and dropout_p != 1.0:
        keep_setting(moving[1], call)
    return execute(call)


@knows_other_names
def attention_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: AttnMask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | str | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    normalizer: str | Choice = "softmax",
    temperature: Temperature = None,
    softcap: float | None = None,
    score_mod: ScoreFunction | None = None,
    sink: float | Tensor | None = None,
    window: Window = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    gate: Tensor | None = None,
    return_stats: Wanted = False,
    backend: str | None = None,
) -> Path:
    """The backend that `regard.attention` takes for these arguments, and why; nothing is computed.

    >>> import regard, torch
    >>> q = k = v = torch.randn(1, 2, 8, 4)
    >>> print(regard.attention_path(q, k, v))
    torch: plain softmax without statistics: torch's own fused kernels
    >>> regard.attention_path(q, k, v, return_stats=True).backend
    'cpu'

    The arguments are those of `regard.attention`.

    Returns:
        A `Path`: `.backend`, and `.reason` in words; on a GPU also the kernel, and why faster ones were passed over.

    Raises:
        TypeError: As `regard.attention` raises it.
        ValueError: As `regard.attention` raises it.
    """
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, normalizer, temperature, softcap, score_mod, sink, window,
        key_lengths, gate, return_stats, backend,
    )  # fmt: skip
    call = prepare(q, k, v, options)
    if call.path.backend == "triton":
        return replace(call.path, reason=f"{call.path.reason}; kernel {describe_kernel(call.problem)}")
    return call.path
