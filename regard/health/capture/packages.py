"""Captures flash-attention (2, 3, `flash_attn.cute`), xformers, Transformer Engine and functions of torch.nn.attention.

A model holds a reference to the function, so replacing a module's attribute would miss it. While calls are captured
the function's code object is replaced by one that passes its arguments, by name, to a capture function; the original
runs as a copy of the function. A class of modules has its `forward` replaced.

One reader serves every version of flash-attention that keeps the names of arguments. An argument that changes the
result and is not understood here makes the call unmeasured, with the argument's name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.health.capture.flex_calls import capture_flex
from regard.health.capture.fused_call import FusedCall, Sides, capture_fused
from regard.health.capture.guard import guarded

Capture = Callable[[Callable, dict[str, Any]], Any]
FLASH = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
         "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")  # fmt: skip
MODULES = ("flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface",
           "flash_attn.cute.interface")  # fmt: skip
# arguments that change the result and are not understood, unless they are None, False, 0 or empty
FOREIGN = (
    "qv", "q_descale", "k_descale", "v_descale", "gather_kv_indices", "score_mod", "mask_mod", "aux_tensors",
    "block_sparse_tensors", "full_block_cnt", "mask_block_cnt", "page_table", "block_table", "attention_chunk",
    "seqused_q", "seqused_k", "num_heads_q",
)  # fmt: skip
EXTRA = ("return_attn_probs", "return_lse", "return_softmax_lse", "return_aux")
PACKED_XFORMERS = ("BlockDiagonalMask", "BlockDiagonalCausalMask", "BlockDiagonalCausalFromBottomRightMask")
CAUSAL_XFORMERS = ("LowerTriangularMask", "LowerTriangularFromBottomRightMask", *PACKED_XFORMERS[1:])
ENGINE = ("transformer_engine.pytorch.attention",
          "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")  # fmt: skip


def capture_flash(original: Callable, given: dict[str, Any]) -> Any:
    """Captures flash_attn_func, _varlen_func and their qkv- and kv-packed forms."""
    q, k, v = _unstack(given)
    sink, cu_q = given.get("learnable_sink"), given.get("cu_seqlens_q", given.get("cu_seqlens"))
    return capture_fused(
        FusedCall(
            kind=original.__name__, run=_make_run(original, given, "dropout_p"), q=q, k=k, v=v,
            scale=given.get("softmax_scale"), causal=bool(given.get("causal")), window=_sides(given.get("window_size")),
            softcap=given.get("softcap"), slopes=given.get("alibi_slopes"),
            sink=given.get("s_aux") if sink is None else sink, dropout=given.get("dropout_p") or 0.0, cu_q=cu_q,
            cu_k=given.get("cu_seqlens_k", cu_q),
            obstacle=_find_foreign(original, given),
            returns_more="dropout_p" not in given or any(given.get(name) for name in EXTRA),
        )
    )  # fmt: skip


def capture_cache(original: Callable, given: dict[str, Any]) -> Any:
    """Reports flash_attn_with_kvcache as not measured."""
    q, reason = given["q"], f"{original.__name__} writes keys and values to its cache inside the kernel"
    return capture_fused(FusedCall(original.__name__, lambda dropout: original(**given), q, q, q, obstacle=reason))


def capture_varlen(original: Callable, given: dict[str, Any]) -> Any:
    """Captures torch.nn.attention.varlen.varlen_attn, whose window (-1, 0) is causal order."""
    left, right = _sides(given.get("window_size"))
    return capture_fused(
        FusedCall(
            kind="varlen_attn", run=lambda dropout: original(**given), q=given["query"], k=given["key"],
            v=given["value"], scale=given.get("scale"), causal=bool(given.get("is_causal")) or right == 0,
            window=(left, None if right == 0 else right), cu_q=given["cu_seq_q"], cu_k=given["cu_seq_k"],
            returns_more=given.get("return_aux") is not None, obstacle=_find_foreign(original, given),
        )
    )  # fmt: skip


def capture_xformers(original: Callable, given: dict[str, Any]) -> Any:
    """Captures xformers.ops.memory_efficient_attention; other masks than the named ones are made dense."""
    q, k, v, bias = (given[name] for name in ("query", "key", "value", "attn_bias"))
    run, kind = _make_run(original, given, "p"), type(bias).__name__
    causal = kind in CAUSAL_XFORMERS
    fused = FusedCall(
        "memory_efficient_attention", run, q, k, v, scale=given.get("scale"), dropout=given.get("p") or 0.0,
        causal=causal, at_first_key=causal and "FromBottomRight" not in kind,
    )  # fmt: skip
    if q.ndim != 4:
        fused.obstacle = f"memory_efficient_attention was given {q.ndim} dims; measured are [B, M, H, K]"
    elif kind in PACKED_XFORMERS:
        fused.q, fused.k, fused.v, fused.run = q[0], k[0], v[0], lambda dropout: run(dropout)[0]
        fused.cu_q, fused.cu_k = (info.seqstart.to(q.device) for info in (bias.q_seqinfo, bias.k_seqinfo))
        return capture_fused(fused)[None]
    elif isinstance(bias, Tensor):
        fused.mask = bias
    elif bias is not None and not causal:
        fused.mask = bias.materialize((q.shape[1], k.shape[1]), dtype=torch.float32, device=q.device)
    return capture_fused(fused)


def capture_transformer_engine(original: Callable, given: dict[str, Any]) -> Any:
    """Captures `DotProductAttention.forward` of transformer_engine.pytorch, whose output has its heads joined."""
    module, mask, bias = given["self"], given.get("attention_mask"), given.get("core_attention_bias_type", "no_bias")
    layout, order = (given.get(name) or getattr(module, name) for name in ("qkv_format", "attn_mask_type"))
    left, right = _sides(given.get("window_size") or getattr(module, "window_size", None))
    causal, slopes = "causal" in order, given.get("alibi_slopes") if bias == "alibi" else None
    foreign = {
        f"qkv_format={layout!r}": layout not in ("sbhd", "bshd", "thd"),
        f"core_attention_bias_type={bias!r}": bias != "no_bias" and slopes is None,
        "a pair of masks": isinstance(mask, tuple),
        "padding by cu_seqlens in batches": "padding" in order and layout != "thd" and mask is None,
        "cu_seqlens_q_padded": given.get("cu_seqlens_q_padded") is not None,
        "inference_params": given.get("inference_params") is not None,
        "softmax_type": getattr(module, "softmax_type", "vanilla") != "vanilla",
        "return_max_logit": getattr(module, "return_max_logit", False),
    }

    def run(dropout: float | None) -> Any:
        if dropout is None or not module.training:
            return original(**given)
        module.eval()
        try:
            return original(**given)
        finally:
            module.train()

    q, k, v = (given[name] for name in ("query_layer", "key_layer", "value_layer"))
    fused = FusedCall(
        "DotProductAttention", run, q, k, v, scale=getattr(module, "softmax_scale", None), causal=causal,
        at_first_key=causal and "bottom_right" not in order, window=(left, None if causal else right), slopes=slopes,
        dropout=module.attention_dropout if module.training else 0.0,
    )  # fmt: skip
    if name := next((name for name, is_given in foreign.items() if is_given), None):
        fused.obstacle = f"DotProductAttention was given {name}, which is not measured"
        return capture_fused(fused)
    if layout == "thd":
        fused.cu_q, fused.cu_k = given["cu_seqlens_q"], given["cu_seqlens_kv"]
    elif mask is not None and ("padding" in order or order == "arbitrary"):
        fused.mask = ~mask  # there True hides

    def turn(x: Tensor) -> Tensor:
        return x.transpose(0, 1) if layout == "sbhd" else x

    fused.q, fused.k, fused.v = turn(q), turn(k), turn(v)
    fused.run = lambda dropout: turn(run(dropout).unflatten(-1, (q.shape[-2], -1)))
    return turn(capture_fused(fused)).flatten(-2)


def _make_run(original: Callable, given: dict[str, Any], dropout_name: str) -> Callable[[float | None], Any]:
    def run(dropout: float | None) -> Any:
        changed = {} if dropout is None or dropout_name not in given else {dropout_name: dropout}
        return original(**{**given, **changed})

    return run


def _find_foreign(original: Callable, given: dict[str, Any]) -> str | None:
    """Returns what is said of the first argument that is not understood; None without one."""
    name = next((name for name in FOREIGN if isinstance(given.get(name), Tensor) or given.get(name)), None)
    return None if name is None else f"{original.__name__} was given {name}, which is not measured"


def _unstack(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v; packed forms hold them along the third dim from the right."""
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
        return q, k, v
    k, v = given["kv"].unbind(-3) if "kv" in given else (given["k"], given["v"])
    return given["q"], k, v


def _sides(window: Any) -> Sides:
    """Returns a window with None for no limit."""
    left, right = (None if side is None or side < 0 else int(side) for side in window or (None, None))
    return left, right


FUNCTIONS: dict[tuple[str, str], Capture] = {
    **{(module, name): capture_flash for module in MODULES for name in FLASH},
    **{(module, "flash_attn_with_kvcache"): capture_cache for module in MODULES},
    ("torch.nn.attention.varlen", "varlen_attn"): capture_varlen,
    ("torch.nn.attention.flex_attention", "flex_attention"): capture_flex,
    ("xformers.ops.fmha", "memory_efficient_attention"): capture_xformers,
    **{(module, "DotProductAttention"): capture_transformer_engine for module in ENGINE},
}
_PATCHED: dict[int, tuple[Any, str, Any]] = {}  # by id: a function or class, its attribute that changed, what that was


def patch_packages() -> None:
    """Patches what is imported by now, and transformers' registry; a second call does nothing to what is patched."""
    if "transformers" in sys.modules:
        from regard.health.capture import transformers_calls

        transformers_calls.patch_registry()
    for (module, name), capture in FUNCTIONS.items():
        found: Any = getattr(sys.modules.get(module), name, None)
        if id(found) in _PATCHED:
            continue
        if isinstance(found, type):
            passing = _pass_by_name(found.forward, capture)  # type: ignore[attr-defined]
            _PATCHED[id(found)] = found, "forward", found.forward  # type: ignore[attr-defined]
            found.forward = passing  # type: ignore[attr-defined]
        elif isinstance(found, FunctionType) and found.__closure__ is None:
            signature, code = inspect.signature(found), _make_code(found, capture)
            _PATCHED[id(found)] = found, "__code__", found.__code__
            found.__code__ = code
            found.__signature__ = signature  # type: ignore[attr-defined]  # models pass what it names alone


def unpatch_packages() -> None:
    """Restores every function and class."""
    for found, attribute, before in _PATCHED.values():
        setattr(found, attribute, before)
        if attribute == "__code__":
            del found.__signature__
    _PATCHED.clear()
    if "transformers" in sys.modules:
        from regard.health.capture import transformers_calls

        transformers_calls.unpatch_registry()


def _template(*args: Any, **kwargs: Any) -> Any:
    capture: Any = "<capture>"  # a function takes its place among the code's constants; globals are another package's
    return capture(*args, **kwargs)


def _make_code(function: FunctionType, capture: Capture) -> CodeType:
    """Returns code that gives `capture` a copy of the function and its arguments by name."""
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    code, passing = _template.__code__, _pass_by_name(original, capture)
    constants = tuple(passing if x == "<capture>" else x for x in code.co_consts)
    return code.replace(co_name=function.__name__, co_consts=constants)


def _pass_by_name(original: Callable, capture: Capture) -> Callable:
    """Returns a function that gives `capture` the original and its arguments by name."""
    signature = inspect.signature(original)
    others = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")

    def pass_by_name(*args: Any, **kwargs: Any) -> Any:
        def ours(run: Callable) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            more = given.pop(others, {})
            return capture(original, {**given, **more})

        return guarded(ours, partial(original, *args, **kwargs))

    return pass_by_name
