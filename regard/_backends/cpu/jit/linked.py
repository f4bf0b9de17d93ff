"""Compiles functions that only kernels call, to LLVM code alone: a kernel links a copy of each.

numba by itself also makes machine code of each of these functions, which nobody calls: a fifth of its time.
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]  # a C module
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering


class LinkedLibrary(JITCodeLibrary):
    """Optimised LLVM code without machine code."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class LinkedLowering(NativeLowering):
    """Lowers a function to a `LinkedLibrary`, which its callers find by a function object without an address."""

    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        name = lowered.fndesc.lookup_module(), lowered.fndesc.qualname, ""
        key = _dynfunc.make_function(*name, 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        return True


class LinkedCompiler(CompilerBase):
    """numba's own passes with `LinkedLowering` in the place of `NativeLowering`."""

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (LinkedLowering, text) if found is NativeLowering else (found, text) for found, text in passes.passes
        ]
        passes.finalize()
        return [passes]
