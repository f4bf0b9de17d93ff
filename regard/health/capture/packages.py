"""Intercepts attention functions of other packages, under whatever name a model imported them.

A model holds a reference to the function, so replacing a module's attribute would miss it. While calls are captured
the function's code object is replaced by one that passes its arguments, by name, to a capture function; the original
runs as a copy of the function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from regard.health.capture.flash_calls import capture_flash, capture_varlen
from regard.health.capture.flex_calls import capture_flex

Capture = Callable[[Callable, dict[str, Any]], Any]
FLASH = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
         "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")  # fmt: skip
MODULES = ("flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface",
           "flash_attn.cute.interface")  # fmt: skip
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
