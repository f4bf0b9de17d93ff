"""From a template and a normaliser's tile functions to one compiled kernel, kept on disk between processes.

A template is an ordinary Python function that leaves three names open:

    tile.numerator(e, s, c)    what was given to `kernel`: a tile function, a number, or the name of a word
    words.exp(x)               the numba dialect, `regard._backends.cpu.jit.words`
    real(x)                    float32 or float64; float literals become `real` too, so that nothing widens unasked

`kernel` writes template, tile functions and everything they call as the text of one module and compiles that. numba
caches by file, so the text lies in the user's cache folder under a name that carries its hash: editing a normaliser,
a template or the dialect gives another file, never stale code. The text run is the one made here, not the one found.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from regard.normalizers._language import callees, plain, source

tile: Any = None
words: Any = None
real: Any = None

_HEAD = """\
import math

import numpy as np
from numba import {real} as real, njit

from regard._backends.cpu.jit import words

tl = words
strict = dict(fastmath={{"contract"}}, error_model="numpy", _nrt={nrt})
inner = njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **strict)
outer = njit(cache=True, nogil=True, no_cfunc_wrapper=True, **strict)

"""
_kernels: dict[tuple, Callable] = {}
_lock = threading.RLock()


def kernel(template: FunctionType, tiles: Mapping[str, Any], precision: str, *, allocates: bool = True) -> Callable:
    """The template with its tile functions (and numbers) filled in, compiled for precision "float32" or "float64".

    Compiled at the first call for each set of argument types, or loaded from disk; releases the interpreter lock.
    Calling it from several threads at once is safe. A template that creates no array may say so (allocates=False):
    its slices then cost no reference counts, which matters when rows are short.
    """
    key = (template, precision, allocates, *sorted((name, plain(value)) for name, value in tiles.items()))
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                module = _module(template, text(template, tiles, precision, allocates))
                found = _kernels[key] = getattr(module, template.__name__)
    return found


def text(template: FunctionType, tiles: Mapping[str, Any], precision: str, allocates: bool = True) -> str:
    """The module that `kernel` compiles, as text."""
    writer = _Writer(tiles)
    writer.add(template, template.__name__, "@outer")
    dialect = hashlib.sha256(_dialect().encode()).hexdigest()[:16]
    body = "\n\n".join(writer.parts)
    return f"# regard._backends.cpu.jit.words {dialect}\n{_HEAD.format(real=precision, nrt=allocates)}\n{body}\n"


class _Writer:
    """Collects functions, callees first, with open names bound and literals made `real`."""

    def __init__(self, tiles: Mapping[str, Any]) -> None:
        self.tiles = tiles
        self.names: dict[FunctionType, str] = {}
        self.parts: list[str] = []

    def add(self, function: Any, name: str, decorator: str = "@inner", is_tile: bool = False) -> str:
        body = plain(function)
        if body in self.names:
            return self.names[body]
        self.names[body] = name
        tree = ast.parse(source(function))
        tree = _Bind(self, body, is_tile).visit(tree)
        tree.body[0].name = name
        self.parts.append(f"{decorator}\n{ast.unparse(ast.fix_missing_locations(tree))}")
        return name


class _Bind(ast.NodeTransformer):
    def __init__(self, writer: _Writer, function: FunctionType, is_tile: bool) -> None:
        self.writer = writer
        self.scope = function.__globals__
        self.calls = callees(function)
        self.is_tile = is_tile

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        for argument in node.args.args:
            argument.annotation = None
        node.returns = None
        node.decorator_list = []
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == "tile"):
            return self.generic_visit(node)
        value = self.writer.tiles[node.attr]
        if isinstance(value, str):
            return ast.Attribute(ast.Name("words", ast.Load()), value, ast.Load())
        if isinstance(value, (bool, int, float)):
            return self.visit_Constant(ast.Constant(value))
        of_template = plain(value).__module__.startswith("regard._backends.cpu.")  # a part of the template that varies
        return ast.Name(self.writer.add(value, f"tile_{node.attr}", is_tile=not of_template), ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.calls:
            name = f"{node.id}_{len(self.writer.names)}"
            return ast.Name(self.writer.add(self.calls[node.id], name, is_tile=self.is_tile), ast.Load())
        value = self.scope.get(node.id)
        value = getattr(value, "value", value)  # a tl.constexpr
        if isinstance(node.ctx, ast.Load) and isinstance(value, (bool, int, float)):
            return self.visit_Constant(ast.Constant(value))
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return _real(node.value) if isinstance(node.value, float) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        node = self.generic_visit(node)
        if self.is_tile and not isinstance(node.op, ast.Pow):  # an integer beside a float32 would give a float64
            for side in ("left", "right"):
                constant = getattr(node, side)
                if isinstance(constant, ast.Constant) and type(constant.value) is int:
                    setattr(node, side, _real(float(constant.value)))
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        node = self.generic_visit(node)
        if self.is_tile and node.value is not None:
            node.value = ast.Call(ast.Name("real", ast.Load()), [node.value], [])
        return node


def _real(value: float) -> ast.Call:
    number = repr(value) if math.isfinite(value) else str(value).replace("inf", "math.inf").replace("nan", "math.nan")
    return ast.Call(ast.Name("real", ast.Load()), [ast.parse(number, mode="eval").body], [])


@functools.cache
def _dialect() -> str:
    names = "words.py", "intrinsics.py", "vectors.py"
    return "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)


def _module(template: FunctionType, content: str) -> ModuleType:
    require_numba()
    name = f"regard_kernel_{template.__name__}_{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    path = _stored(name, content)
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # numba looks it up by name when it loads from disk
    exec(compile(content, str(path), "exec"), module.__dict__)
    return module


def require_numba() -> None:
    """Say what is missing, if it is."""
    try:
        import numba  # noqa: F401
    except ImportError as missing:
        raise ImportError(f"regard computes on the CPU with numba ({missing}): pip install numba") from None


def _stored(name: str, content: str) -> Path:
    """A file that holds exactly `content`, in the cache folder: numba keeps its machine code beside it."""
    for folder in (cache_folder, _private_folder):
        try:
            path = folder() / f"{name}.py"
            if not path.is_file() or path.read_text(encoding="utf-8") != content:
                beside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
                beside.write_text(content, encoding="utf-8")
                os.replace(beside, path)
            return path
        except OSError:
            continue
    raise OSError(f"no folder to keep compiled kernels in: neither {_wanted_folder()} nor a temporary one is writable")


def _wanted_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def cache_folder() -> Path:
    """Where compiled kernels are kept, for their owner alone: $XDG_CACHE_HOME/regard or ~/.cache/regard."""
    folder = _wanted_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{folder} can be written by others")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="regard-")


def _private_folder() -> Path:
    return Path(_temporary().name)
