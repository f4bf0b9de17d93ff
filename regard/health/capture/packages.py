"""Intercepts attention functions of other packages, under whatever name a model imported them.

A model holds a reference to the function, so replacing a module's attribute would miss it. While calls are captured
the function's code object is replaced by one with the same parameters that passes them, by name, to a capture
function; the original runs as a copy of the function. A method of a module class is replaced on its class.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from regard.health.capture.flash_calls import (
    capture_cache,
    capture_flash,
    capture_transformer_engine,
    capture_varlen,
    capture_xformers,
)
from regard.health.capture.flex_calls import capture_flex

Capture = Callable[[Callable, dict[str, Any]], Any]
FLASH = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
         "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")  # fmt: skip
MODULES = ("flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface",
           "flash_attn.cute.interface")  # fmt: skip
FUNCTIONS: dict[tuple[str, str], Capture] = {
    **{(module, name): capture_flash for module in MODULES for name in FLASH},
    **{(module, "flash_attn_with_kvcache"): capture_cache for module in MODULES},
    ("torch.nn.attention.varlen", "varlen_attn"): capture_varlen,
    ("torch.nn.attention.flex_attention", "flex_attention"): capture_flex,
    ("xformers.ops.fmha", "memory_efficient_attention"): capture_xformers,
}
CLASSES: dict[tuple[str, str], Capture] = {
    (module, "DotProductAttention"): capture_transformer_engine
    for module in (
        "transformer_engine.pytorch.attention",
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    )
}
_PATCHED: dict[int, tuple[FunctionType, CodeType]] = {}
_FORWARDS: dict[type, Callable] = {}


def patch_packages() -> None:
    """Patches what is imported by now; a second call does nothing to what is patched."""
    for (module, name), capture in FUNCTIONS.items():
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, FunctionType) and function.__closure__ is None and id(function) not in _PATCHED:
            _PATCHED[id(function)] = function, function.__code__
            function.__code__ = _code(function, _passing(_copy(function), capture))
    for (module, name), capture in CLASSES.items():
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and kind not in _FORWARDS:
            _FORWARDS[kind] = kind.forward  # type: ignore[attr-defined]
            kind.forward = _method(kind.forward, capture)  # type: ignore[attr-defined]


def unpatch_packages() -> None:
    """Restores every function and class."""
    for function, code in _PATCHED.values():
        function.__code__ = code
    _PATCHED.clear()
    for kind, forward in _FORWARDS.items():
        kind.forward = forward  # type: ignore[attr-defined]
    _FORWARDS.clear()


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _passing(original: Callable, capture: Capture) -> Callable:
    def passed(**given: Any) -> Any:
        more = given.pop("_more_", {})
        return capture(original, {**given, **more})

    return passed


def _code(function: FunctionType, passed: Callable) -> CodeType:
    """Returns code with the function's own parameters that returns passed(name=value, …)."""
    code = function.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    parameters = list(named[: code.co_argcount])
    if code.co_kwonlyargcount:
        parameters += ["*", *named[code.co_argcount :]]
    arguments = [f"{name}={name}" for name in named]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append("**_more_")
        arguments.append("_more_=_more_")
    text = f"def {function.__name__}({', '.join(parameters)}):\n    return '_passed_'({', '.join(arguments)})\n"
    made = next(x for x in _compile(text).co_consts if isinstance(x, CodeType))
    return made.replace(co_consts=tuple(passed if x == "_passed_" else x for x in made.co_consts))


def _compile(text: str) -> CodeType:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the text calls a string, in whose place the function is put
        return compile(text, "<regard>", "exec")


def _method(forward: Callable, capture: Capture) -> Callable:
    signature = inspect.signature(forward)

    def method(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        return capture(forward, {**given, **(given.pop(extra) if extra else {})})

    return method
