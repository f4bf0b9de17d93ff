"""`regard.attention` and `regard.attention_path`: a plan for a call seen before, else prepare, dispatch and execute.

No path but the reference builds an N × N tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard._call.arguments import AttentionOptions, AttnMask, Keywords, Scale, takes_options
from regard._core import dtensor, plans
from regard._core.derivatives.transforms import attend_duals
from regard._core.dispatch import Path, describe_kernel
from regard._core.execute import execute
from regard._core.formulas import gate_result
from regard._core.key_reading import asks_for_keys, attend_with_keys
from regard._core.prepare import prepare
from regard._facts import is_plain_eager
from regard.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Path", "attention", "attention_path"]

Rows = int | Sequence[int] | Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: AttnMask = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: Scale = ..., enable_gqa: bool = ..., *, return_stats: Literal[False] = ..., **options: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: AttnMask = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: Scale = ..., enable_gqa: bool = ..., *, return_stats: Literal[True] | str | Sequence[str],
    **options: Unpack[Keywords],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: AttnMask = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: Scale = ..., enable_gqa: bool = ..., *, return_weights: int | Sequence[int] | Tensor,
    return_stats: bool | str | Sequence[str] = ..., **options: Unpack[Keywords],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip


@takes_options
def attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, return_weights: Rows = None) -> Any:
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
        score_mod: a `regard.bias.ScoreFunction` f(s, i, j, h, …), which takes the place of the soft cap.
        sink: a logit, or one per head, that joins the denominator after the temperature; softmax and softmax1 only.
        window: (left, right), None for no limit: query i sees keys i − left … i + right.
        key_lengths: (B,) ints: keys from key_lengths[b] on are hidden.
        gate: logits g of an output gate (arXiv 2505.06708), o_i ← σ(g_i)·o_i: one per head, (…, Hq, Lq) or
            (…, Hq, Lq, 1), or one per element, (…, Hq, Lq, Dv). Statistics are those before the gate.
        return_stats: True for all statistics, or a tuple of names, even (); the result is then (out, stats). `entropy`,
            `logsumexp` and `logit_variance` of softmax, softmax1 and sinks carry gradients, the others none. Beside
            them `"received"`, (…, Hq, Lk): the weight that each key receives, summed over the queries; and
            `"top_keys(8)"`: a pair (index, weight), each (…, Hq, Lq, 8), of each row's keys of most weight.
        return_weights: rows, an int or several, whose weights (…, Hq, R, Lk) come as `stats.weights`; the result is
            then (out, stats). Neither these nor `received` nor `top_keys` carry gradients or make an N × N tensor.
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
    if return_weights is not None or (type(options.return_stats) is not bool and asks_for_keys(options.return_stats)):
        return attend_with_keys(q, k, v, options, return_weights)
    key = plans.call_key(q, k, v, options) if is_plain_eager() else None
    plan = None if key is None else plans.plans.get(key)
    if plan is None:
        moving = None
        if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:  # a compiler would guard on the level
            moving = plans.plan_duals(q, k, v, options)
        if moving is not None and moving[1] in plans.settings:
            return attend_duals(plans.settings[moving[1]], moving[0])
        if any(map(dtensor.is_dtensor, (q, k, v))):
            return dtensor.attention(attention, q, k, v, options)
        call = prepare(q, k, v, options)
        if moving is not None:
            plans.keep_setting(moving[1], call)
        plan = None if key is None else plans.make_plan(call)
        if plan is None:
            return execute(call)
        plans.keep_plan(key, plan, call)
    result = plan(q, k, v)
    return result if options.gate is None else gate_result(result, options.gate)


@takes_options
def attention_path(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Path:
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
    call = prepare(q, k, v, options)
    if call.path.backend == "triton":
        return replace(call.path, reason=f"{call.path.reason}; kernel {describe_kernel(call.problem)}")
    return call.path
