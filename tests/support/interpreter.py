"""Makes Triton's interpreter fast enough for tests: more than half of its time goes into what is left out here.

- It patches `triton.language` again for every function that a kernel calls; once per launch is enough.
- It makes a table of dtypes at every operation, and checks the shape of every block.
- It computes integers in 32 and in 64 bits and compares; tests that need this ask for it (`check_overflow`).
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType

_worn: set[str] | None = None  # the modules that the launch under way has dressed


def speed_up() -> None:
    """Applies the changes of this module to Triton; a second call does nothing."""
    from triton.runtime import interpreter

    if hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    dress_once(interpreter)
    remember_dtypes(interpreter)
    remember_shapes(interpreter.tl)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def check_overflow(monkeypatch) -> None:
    """Makes an integer overflow in a kernel an error for one test, as it is in Triton's interpreter by itself."""
    from triton.runtime import interpreter

    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def dress_once(interpreter: ModuleType) -> None:
    """From now on the functions that a kernel calls find the language as its launch left it."""
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


def remember_dtypes(interpreter: ModuleType) -> None:
    """Looks a scalar's numpy dtype up once."""
    tl, of_scalar = interpreter.tl, functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype):
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return interpreter.np.dtype("uint64") if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = numpy_dtype


def remember_shapes(tl: ModuleType) -> None:
    """Checks the shape of a type of blocks once, and makes once what its tensors have in common."""
    make_type, make_tensor, made = tl.block_type.__init__, tl.tensor.__init__, {}

    @functools.wraps(make_type)
    def make_type_once(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in made:
            make_type(self, element_ty, shape)
            made[key] = {**vars(self), "of_tensors": {}}
        vars(self).update(made[key])

    @functools.wraps(make_tensor)
    def make_tensor_alike(self, handle, type):
        known = vars(type).get("of_tensors")  # None for a scalar
        if known:
            vars(self).update(known, handle=handle, type=type)
            return
        make_tensor(self, handle, type)
        if known is not None:
            known.update({name: x for name, x in vars(self).items() if name not in ("handle", "type")})

    tl.block_type.__init__, tl.tensor.__init__ = make_type_once, make_tensor_alike
