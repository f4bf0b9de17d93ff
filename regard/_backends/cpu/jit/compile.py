"""Compiles a template with a normaliser's tile functions to one kernel, which stays on disk between processes.

A template is an ordinary Python function with three open names:

    tile.numerator(e, s, c)    what was given to `kernel`: a tile function, a number, or the name of a primitive
    prim.exp(x)                the numba dialect of the tile language, `regard._backends.cpu.jit.primitives`
    real(x)                    float32 or float64; float literals become `real` too, so that nothing widens unasked

`kernel` writes the template, the tile functions and everything they call as the source of one module and compiles it.
numba caches by file, so the source is stored in the user's cache folder under a name that has its hash: an edit of a
normaliser, a template or a primitive gives another file, never stale code. What runs is the source made here, not the
file found there.

The functions that a template calls are named by the hash of their source, and kernels share them: most of the time of
a compilation is numba's work on these functions, and kernels differ in few of them.
"""

from __future__ import annotations

import ast
import copy
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

import torch

from regard.normalizers import Normalizer
from regard.normalizers._language import callees, plain, source

tile: Any = None
prim: Any = None
real: Any = None

_HEAD = """\
# regard._backends.cpu.jit.primitives {hash}
import math

import numpy as np
from numba import {real} as real, njit

from regard._backends.cpu.jit import primitives as prim
from regard._backends.cpu.jit.compile import share

tl = prim
strict = dict(fastmath={{"contract"}}, error_model="numpy", _nrt=False)
inner = share(njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **strict))
outer = njit(cache=True, nogil=True, no_cfunc_wrapper=True, **strict)

"""
_kernels: dict[tuple, Callable] = {}
_shared: dict[str, Callable] = {}  # by name
_lock = threading.RLock()


def kernel(template: FunctionType, tiles: Mapping[str, Any], precision: str) -> Callable:
    """The template with its tile functions and constants filled in, compiled for precision "float32" or "float64".

    It is compiled at the first call for each set of argument types, or loaded from disk. It releases the interpreter
    lock and may be called from several threads. A template creates no array and returns none, so that slices cost no
    reference counts.
    """
    key = (template, precision, *sorted((name, plain(value)) for name, value in tiles.items()))
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                module = _load_module(template, module_source(template, tiles, precision))
                found = _kernels[key] = getattr(module, template.__name__)
    return found


def cache_by_normalizer(make: Callable) -> Callable:
    """Caches make(normalizer, *key) by the normaliser's identity, because hashing the record takes too long."""
    made: dict[tuple, tuple[Normalizer, Any]] = {}

    @functools.wraps(make)
    def cached(normalizer: Normalizer, *key: Any) -> Any:
        found = made.get((id(normalizer), *key))
        if found is None:  # the normaliser is kept, so that no other can have its id
            found = made[(id(normalizer), *key)] = normalizer, make(normalizer, *key)
        return found[1]

    return cached


def precision_of(dtype: torch.dtype) -> str:
    """The precision that a dtype is computed in: "float64" or "float32"."""
    return "float64" if dtype == torch.float64 else "float32"


def module_source(template: FunctionType, tiles: Mapping[str, Any], precision: str) -> str:
    """The source of the module that `kernel` compiles."""
    head = _HEAD.format(hash=_primitives_hash(), real=precision)
    writer = _Writer(tiles, head)
    writer.write_outer(template)
    return "\n\n".join(writer.parts) + "\n"


def share(decorate: Callable) -> Callable:
    """The decorator of functions whose name tells their source: compiles the first of a name and returns it again."""

    def shared(function: FunctionType) -> Callable:
        found = _shared.get(function.__name__)
        if found is None:
            # A kernel on disk names the modules of its functions; the module of another kernel need not be there.
            scope = {**function.__globals__, "__name__": "regard._backends.cpu.jit.primitives"}
            found = decorate(FunctionType(function.__code__, scope, function.__name__, function.__defaults__))
            _shared[function.__name__] = found
        return found

    return shared


class _Writer:
    """Collects the source of functions, callees first, with open names bound and literals made `real`."""

    def __init__(self, tiles: Mapping[str, Any], head: str) -> None:
        self.tiles = tiles
        self.head = head
        self.names: dict[FunctionType, str] = {}
        self.parts: list[str] = [head]

    def write_outer(self, template: FunctionType) -> None:
        self.parts.append(f"@outer\n{ast.unparse(self._bind(template, is_tile=False))}")

    def add(self, function: Any, is_tile: bool) -> str:
        """Writes a function that another calls, after what it calls itself; its name has the hash of all of these."""
        body = plain(function)
        if body not in self.names:
            tree = self._bind(function, is_tile)
            content = self.head + ast.unparse(tree)
            tree.name = self.names[body] = f"{tree.name}_{hashlib.sha256(content.encode()).hexdigest()[:24]}"
            self.parts.append(f"@inner\n{ast.unparse(tree)}")
        return self.names[body]

    def _bind(self, function: Any, is_tile: bool) -> ast.FunctionDef:
        tree = _Binder(self, plain(function), is_tile).visit(ast.parse(source(function)).body[0])
        return ast.fix_missing_locations(tree)


class _Binder(ast.NodeTransformer):
    """Replaces the open names of one function by what they stand for."""

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

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.AST]:
        """Write the body of `for at, function in tile.name` once for each function of a tuple."""
        name = node.iter.attr if isinstance(node.iter, ast.Attribute) and ast.unparse(node.iter.value) == "tile" else ""
        if not isinstance(self.writer.tiles.get(name), tuple):
            return self.generic_visit(node)
        at, called = (x.id for x in node.target.elts)  # type: ignore[attr-defined]
        bodies = []
        for place, function in enumerate(self.writer.tiles[name]):
            names = {at: ast.Constant(place), called: ast.Name(self.writer.add(function, is_tile=True), ast.Load())}
            bodies += [_Renamer(names).visit(copy.deepcopy(statement)) for statement in node.body]
        return bodies

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == "tile"):
            return self.generic_visit(node)
        value = self.writer.tiles[node.attr]
        if isinstance(value, str):
            return ast.Attribute(ast.Name("prim", ast.Load()), value, ast.Load())
        if isinstance(value, (bool, int, float)):
            return self.visit_Constant(ast.Constant(value))
        of_template = plain(value).__module__.startswith("regard._backends.cpu.")  # a part of the template that varies
        return ast.Name(self.writer.add(value, is_tile=not of_template), ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.calls:
            return ast.Name(self.writer.add(self.calls[node.id], self.is_tile), ast.Load())
        value = self.scope.get(node.id)
        value = getattr(value, "value", value)  # a tl.constexpr
        if isinstance(node.ctx, ast.Load) and isinstance(value, (bool, int, float)):
            return self.visit_Constant(ast.Constant(value))
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return _real_call(node.value) if isinstance(node.value, float) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        node = self.generic_visit(node)
        if self.is_tile and not isinstance(node.op, ast.Pow):  # an integer beside a float32 would give a float64
            for side in ("left", "right"):
                constant = getattr(node, side)
                if isinstance(constant, ast.Constant) and type(constant.value) is int:
                    setattr(node, side, _real_call(float(constant.value)))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node = self.generic_visit(node)
        if self.is_tile:  # as above
            node.args = [
                _real_call(float(x.value)) if isinstance(x, ast.Constant) and type(x.value) is int else x
                for x in node.args
            ]
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        node = self.generic_visit(node)
        if self.is_tile and node.value is not None:
            node.value = ast.Call(ast.Name("real", ast.Load()), [node.value], [])
        return node


class _Renamer(ast.NodeTransformer):
    """Puts nodes in the place of names."""

    def __init__(self, names: dict[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.names.get(node.id, node))


def _real_call(value: float) -> ast.Call:
    number = repr(value) if math.isfinite(value) else str(value).replace("inf", "math.inf").replace("nan", "math.nan")
    return ast.Call(ast.Name("real", ast.Load()), [ast.parse(number, mode="eval").body], [])


@functools.cache
def _primitives_hash() -> str:
    names = "primitives.py", "intrinsics.py"
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in names)
    return hashlib.sha256(sources).hexdigest()[:16]


def _load_module(template: FunctionType, content: str) -> ModuleType:
    require_numba()
    name = f"regard_kernel_{template.__name__}_{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    path = _store_source(name, content)
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # numba looks it up by name when it loads from disk
    exec(compile(content, str(path), "exec"), module.__dict__)
    return module


def require_numba() -> None:
    """Raises an ImportError that names the package if numba is missing."""
    try:
        import numba  # noqa: F401
    except ImportError as missing:
        raise ImportError(f"regard computes on the CPU with numba ({missing}): pip install numba") from None


def _store_source(name: str, content: str) -> Path:
    """Writes `content` to a file in the cache folder, beside which numba keeps the machine code."""
    for folder in (cache_folder, _temporary_folder):
        try:
            path = folder() / f"{name}.py"
            if not path.is_file() or path.read_text(encoding="utf-8") != content:
                beside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
                beside.write_text(content, encoding="utf-8")
                os.replace(beside, path)
            return path
        except OSError as error:
            if chosen := os.environ.get("REGARD_CACHE"):
                raise ValueError(f"REGARD_CACHE={chosen} cannot keep compiled kernels: {error}; name another") from None
    raise OSError(f"no folder to keep compiled kernels in: neither {_default_folder()} nor a temporary one is writable")


def _default_folder() -> Path:
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def cache_folder() -> Path:
    """The owner's folder of compiled kernels: $REGARD_CACHE, $XDG_CACHE_HOME/regard or ~/.cache/regard."""
    folder = _default_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{folder} can be written by others")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


def _temporary_folder() -> Path:
    return Path(_temporary_directory().name)


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="regard-")
