"""Captures flash-attention (2, 3, `flash_attn.cute`), `varlen_attn` and `flex_attention`, however they are imported.

A model holds a reference to the function, so replacing a module's attribute would miss it. While calls are captured
the function's code object is replaced by one that passes its arguments, by name, to a capture function; the original
runs as a copy of the function.

One reader serves every version of flash-attention that keeps the names of arguments. An argument that changes the
result and is not understood here makes the call unmeasured, with the argument's name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from regard.health.capture.flex_calls import capture_flex
from regard.health.capture.fused_call import FusedCall, Sides, capture_fused

Capture = Callable[[Callable, dict[str, Any]], Any]
FLASH = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
         "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")  # fmt: skip
MODULES = ("flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface",
           "flash_attn.cute.interface")  # fmt: skip
# arguments that change the result and are not understood, unless they are None, False, 0 or empty
FOREIGN = (
    "qv", "q_descale", "k_descale", "v_descale", "gather_kv_indices", "score_mod", "mask_mod", "aux_tensors",
    "block_sparse_tensors", "full_block_cnt", "mask_block_cnt", "page_table", "block_table", "attention_chunk",
    "seqused_q", "seqused_k", "num_heads_q", "alibi_slopes",
)  # fmt: skip
EXTRA = ("return_attn_probs", "return_lse", "return_softmax_lse", "return_aux")


def capture_flash(original: Callable, given: dict[str, Any]) -> Any:
    """Captures flash_attn_func, _varlen_func and their qkv- and kv-packed forms."""

    def run(dropout: float | None) -> Any:
        changed = {} if dropout is None or "dropout_p" not in given else {"dropout_p": dropout}
        return original(**{**given, **changed})

    q, k, v = _unstack(given)
    sink, cu_q = given.get("learnable_sink"), given.get("cu_seqlens_q", given.get("cu_seqlens"))
    return capture_fused(
        FusedCall(
            kind=original.__name__, run=run, q=q, k=k, v=v, scale=given.get("softmax_scale"),
            causal=bool(given.get("causal")), window=_sides(given.get("window_size")), softcap=given.get("softcap"),
            sink=given.get("s_aux") if sink is None else sink, dropout=given.get("dropout_p") or 0.0, cu_q=cu_q,
            cu_k=given.get("cu_seqlens_k", cu_q),
            obstacle=_find_foreign(original, given),
            returns_more="dropout_p" not in given or any(given.get(name) for name in EXTRA),
        )
    )  # fmt: skip


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
    ("torch.nn.attention.varlen", "varlen_attn"): capture_varlen,
    ("torch.nn.attention.flex_attention", "flex_attention"): capture_flex,
}
_PATCHED: dict[int, tuple[FunctionType, CodeType]] = {}


def patch_packages() -> None:
    """Patches what is imported by now; a second call does nothing to what is patched."""
    for (module, name), capture in FUNCTIONS.items():
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, FunctionType) and function.__closure__ is None and id(function) not in _PATCHED:
            _PATCHED[id(function)] = function, function.__code__
            function.__code__ = _make_code(function, capture)


def unpatch_packages() -> None:
    """Restores every function."""
    for function, code in _PATCHED.values():
        function.__code__ = code
    _PATCHED.clear()


def _template(*args: Any, **kwargs: Any) -> Any:
    capture: Any = "<capture>"  # a function takes its place among the code's constants; globals are another package's
    return capture(*args, **kwargs)


def _make_code(function: FunctionType, capture: Capture) -> CodeType:
    """Returns code that gives `capture` a copy of the function and its arguments by name."""
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(original)
    others = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")

    def pass_by_name(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        more = given.pop(others, {})
        return capture(original, {**given, **more})

    code = _template.__code__
    constants = tuple(pass_by_name if x == "<capture>" else x for x in code.co_consts)
    return code.replace(co_name=function.__name__, co_consts=constants)
