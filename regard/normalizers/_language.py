"""The tile language: a few functions that Triton, numba and numpy all understand.

A normaliser states its mathematics once, in functions such as

    @jit
    def numerator(e, s, c):
        return tl.maximum(s, 0.0)

Triton compiles them into the GPU kernels. `speak` retells the same functions in another dialect, by
swapping the module behind the name `tl`: numba for the CPU kernels, numpy for the check that a record
makes of itself. Words every dialect knows: `abs exp exp2 log log2 maximum minimum sqrt where`.
Functions may call other `@jit` functions of the same file.
"""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

WORDS = ("abs", "exp", "exp2", "log", "log2", "maximum", "minimum", "sqrt", "where")

numpy_words = SimpleNamespace(**{word: getattr(np, word) for word in WORDS if word != "abs"}, abs=np.abs)


def _torch_word(word: str) -> Any:
    """torch's function, which also takes plain numbers: of a parameter alone it is numpy's."""

    def said(*given):
        like = next((x for x in given if isinstance(x, torch.Tensor)), None)
        if like is None:
            return float(getattr(np, word)(*given))
        if word == "where" and not isinstance(given[0], torch.Tensor):
            return given[1] if given[0] else given[2]
        if word in ("maximum", "minimum"):
            numbers = dict(dtype=like.dtype, device=like.device)
            given = [x if isinstance(x, torch.Tensor) else torch.as_tensor(x, **numbers) for x in given]
        return getattr(torch, word)(*given)

    return said


torch_words = SimpleNamespace(**{word: _torch_word(word) for word in WORDS})

try:
    from triton import jit, knobs

    if knobs.runtime.interpret:
        import triton.language as tl
    else:
        from regard.normalizers import _triton_words as tl  # type: ignore[no-redef]
except ImportError:  # no GPU kernels then; the mathematics below stays readable and checkable
    tl = numpy_words  # type: ignore[assignment]

    def jit(function):
        return function


def plain(function: Any) -> FunctionType:
    """The Python function behind a `@jit` function."""
    return getattr(function, "fn", function)


def source(function: Any) -> str:
    """The text of a tile function, without its decorator."""
    text = textwrap.dedent(inspect.getsource(plain(function)))
    return text[text.index("def ") :]


def callees(function: Any) -> dict[str, Any]:
    """The other `@jit` functions, by name, that a tile function calls."""
    body = plain(function)
    found = {name: body.__globals__[name] for name in body.__code__.co_names if name in body.__globals__}
    return {name: value for name, value in found.items() if isinstance(plain(value), FunctionType)}


def speak(function: Any, words: Any = numpy_words) -> FunctionType:
    """Translate a tile function to another dialect: `tl` is replaced by `words`."""
    body = plain(function)
    scope = dict(body.__globals__)
    scope.update({name: speak(value, words) for name, value in callees(function).items()})
    scope["tl"] = words
    return FunctionType(body.__code__, scope, body.__name__, body.__defaults__, body.__closure__)
