"""Captures flash-attention (2, 3, `flash_attn.cute`), torch's `varlen_attn`, xformers and Transformer Engine.

transformers' `flash_attention_2` and `_3` are in `transformers_calls.py`.

Arguments are read by name, so one reader serves every version that keeps the names. An argument that changes the
result and is not understood here makes the call unmeasured, with the argument's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.health.capture.fused_call import FusedCall, Sides, capture

# arguments that change the result and are not understood, unless they are None, False or 0
FOREIGN = (
    "qv", "q_descale", "k_descale", "v_descale", "gather_kv_indices", "score_mod", "mask_mod", "aux_tensors",
    "block_sparse_tensors", "full_block_cnt", "mask_block_cnt", "page_table", "block_table", "attention_chunk",
    "seqused_q", "num_heads_q", "arbitrary",
)  # fmt: skip
EXTRA = ("return_attn_probs", "return_lse", "return_softmax_lse", "return_aux")


def capture_flash(original: Callable, given: dict[str, Any]) -> Any:
    """Captures flash_attn_func, _varlen_func and their qkv- and kv-packed forms."""
    foreign = next((name for name in FOREIGN if given.get(name) is not None and _is_set(given[name])), None)
    q, k, v = _unstack(given) if foreign is None else (given["q" if "q" in given else "qkv"],) * 3
    cu_q = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    return capture(
        FusedCall(
            kind=original.__name__, run=_runner(original, given, "dropout_p"), q=q, k=k, v=v,
            scale=given.get("softmax_scale"), causal=bool(given.get("causal")), window=_sides(given.get("window_size")),
            softcap=given.get("softcap") or None, sink=_either(given, "learnable_sink", "s_aux"),
            slopes=given.get("alibi_slopes"), dropout=given.get("dropout_p") or 0.0, cu_q=cu_q,
            cu_k=given.get("cu_seqlens_k", cu_q), used_k=given.get("seqused_k"),
            obstacle=None if foreign is None else f"{original.__name__} was given {foreign}, which is not measured",
            returns_more="dropout_p" not in given or any(given.get(name) for name in EXTRA),
        )
    )  # fmt: skip


def capture_cache(original: Callable, given: dict[str, Any]) -> Any:
    """Names a call that writes its keys to a cache inside the kernel."""
    q, reason = given["q"], f"{original.__name__} writes keys and values to its cache inside the kernel"
    return capture(FusedCall(original.__name__, lambda dropout: original(**given), q, q, q, obstacle=reason))


def capture_varlen(original: Callable, given: dict[str, Any]) -> Any:
    """Captures torch.nn.attention.varlen.varlen_attn, whose window (-1, 0) is causal order."""
    left, right = _sides(given.get("window_size"))
    paged = given.get("block_table") is not None
    return capture(
        FusedCall(
            kind="varlen_attn", run=lambda dropout: original(**given), q=given["query"], k=given["key"],
            v=given["value"], scale=given.get("scale"), causal=bool(given.get("is_causal")) or right == 0,
            window=(left, None if right == 0 else right), cu_q=given["cu_seq_q"], cu_k=given["cu_seq_k"],
            used_k=given.get("seqused_k"), returns_more=given.get("return_aux") is not None,
            obstacle="varlen_attn was given block_table, which is not measured" if paged else None,
        )
    )  # fmt: skip


def capture_xformers(original: Callable, given: dict[str, Any]) -> Any:
    """Captures xformers.ops.memory_efficient_attention."""
    q, k, v, bias = (given[name] for name in ("query", "key", "value", "attn_bias"))
    fused = FusedCall(
        "memory_efficient_attention", _runner(original, given, "p"), q, k, v, scale=given.get("scale"),
        dropout=given.get("p") or 0.0,
    )  # fmt: skip
    name = type(bias).__name__
    if q.ndim != 4:
        fused.obstacle = f"memory_efficient_attention was given {q.ndim} dims; measured are [B, M, H, K]"
    elif isinstance(bias, Tensor):
        fused.mask = bias
    elif name in ("LowerTriangularMask", "LowerTriangularFromBottomRightMask"):
        fused.causal, fused.at_first_key = True, name == "LowerTriangularMask"
    elif name in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        fused.cu_q, fused.cu_k = bias.q_seqinfo.seqstart.to(q.device), bias.k_seqinfo.seqstart.to(q.device)
        if name == "BlockDiagonalCausalMask" and not fused.cu_q.equal(fused.cu_k):
            fused.obstacle = "BlockDiagonalCausalMask with other lengths of keys than of queries is not measured"
        fused.causal = name == "BlockDiagonalCausalMask"
        fused.q, fused.k, fused.v = q[0], k[0], v[0]
        fused.run = _without_batch(fused.run)
        return capture(fused)[None] if fused.obstacle is None else original(**given)
    elif bias is not None:
        fused.mask = bias.materialize((q.shape[1], k.shape[1]), dtype=torch.float32, device=q.device)
    return capture(fused)


def capture_transformer_engine(original: Callable, given: dict[str, Any]) -> Any:
    """Captures `DotProductAttention.forward` of transformer_engine.pytorch."""
    module = given["self"]
    layout = given.get("qkv_format") or module.qkv_format
    order = given.get("attn_mask_type") or module.attn_mask_type
    q, k, v = (given[name] for name in ("query_layer", "key_layer", "value_layer"))
    fused = FusedCall(
        "DotProductAttention", _runner_of_module(original, given), q, k, v,
        scale=getattr(module, "softmax_scale", None), causal="causal" in order,
        at_first_key="bottom_right" not in order, flat_heads=True,
        window=_sides(given.get("window_size") or getattr(module, "window_size", None)),
        dropout=module.attention_dropout if module.training else 0.0, slopes=given.get("alibi_slopes"),
    )  # fmt: skip
    if fused.causal:
        fused.window = fused.window[0], None
    mask = given.get("attention_mask")
    if given.get("core_attention_bias_type", "no_bias") not in ("no_bias", "alibi") or given.get("inference_params"):
        fused.obstacle = "it was given core_attention_bias or inference_params, which are not measured"
    elif getattr(module, "softmax_type", "vanilla") != "vanilla" or isinstance(mask, tuple):
        fused.obstacle = "its softmax_type or its pair of masks is not measured"
    elif "padding" in order and layout != "thd" and mask is None:
        fused.obstacle = "its padding is given by cu_seqlens, which is measured for qkv_format='thd' alone"
    elif mask is not None and ("padding" in order or order == "arbitrary"):
        fused.mask = ~mask  # there True hides
    if layout == "thd":
        fused.cu_q, fused.cu_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")
        if given.get("cu_seqlens_q_padded") is not None:
            fused.obstacle = "it was given cu_seqlens_q_padded, which is not measured"
    elif layout == "sbhd":
        fused.q, fused.k, fused.v = (x.transpose(0, 1) for x in (q, k, v))
        own = fused.run
        fused.run = lambda dropout: own(dropout).transpose(0, 1)
        return capture(fused).transpose(0, 1)
    return capture(fused)


def _is_set(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float)) else True


def _either(given: dict, *names: str) -> Tensor | None:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _unstack(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v; packed forms hold them along the third dim from the right."""
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
        return q, k, v
    if "kv" in given:
        k, v = given["kv"].unbind(-3)
        return given["q"], k, v
    return given["q"], given["k"], given["v"]


def _sides(window: Any) -> Sides:
    """Returns a window with None for no limit."""
    if window is None:
        return None, None
    left, right = (None if side is None or side < 0 else int(side) for side in window)
    return left, right


def _runner(original: Callable, given: dict[str, Any], dropout_name: str) -> Callable[[float | None], Any]:
    def run(dropout: float | None) -> Any:
        changed = {} if dropout is None or dropout_name not in given else {dropout_name: dropout}
        return original(**{**given, **changed})

    return run


def _without_batch(run: Callable) -> Callable[[float | None], Any]:
    return lambda dropout: run(dropout)[0]


def _runner_of_module(original: Callable, given: dict[str, Any]) -> Callable[[float | None], Any]:
    module = given["self"]

    def run(dropout: float | None) -> Any:
        training = module.training
        module.training = training and dropout is None
        try:
            return original(**given)
        finally:
            module.training = training

    return run
