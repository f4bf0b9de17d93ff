"""Triton's interpreter dresses up `triton.language` for a launch, and again for every function that the kernel calls.

Once is enough while the launch lasts: half of the time of the tests that interpret kernels went into the rest.
"""

from __future__ import annotations

import functools
from types import ModuleType

_worn: set[str] | None = None  # the modules that the launch under way has dressed


def dress_once() -> None:
    """From now on the functions that a kernel calls find the language as its launch left it."""
    from triton.runtime import interpreter

    if hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    dress, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @functools.wraps(launch)
    def launched(self, *args, **options):
        global _worn
        before, _worn = _worn, set()
        try:
            return launch(self, *args, **options)
        finally:
            _worn = before

    @functools.cache
    def seen_by(fn):
        return {value.__name__ for value in fn.__globals__.values() if isinstance(value, ModuleType)}

    @functools.wraps(dress)
    def dressed(fn):
        modules = seen_by(fn)
        if _worn and modules <= _worn:
            return None  # a called function puts nothing off
        scope = dress(fn)
        if _worn is not None:
            _worn.update(modules)
        return scope

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = dressed, launched
