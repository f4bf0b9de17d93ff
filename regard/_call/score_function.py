"""`ScoreFunction`: f(s, i, j, h, *params) changes every score before bias, mask and normaliser; `score_mod=` takes one.

    s_ij ← f(scale · q_i·k_j, i, j, h, …)          ds_ij ← ds_ij · slope(scale · q_i·k_j, i, j, h, …)

The function is written once, in the words of the tile language (`regard.normalizers`); Triton, numba and torch compute
it.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import math
import numbers
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from regard._facts import readable
from regard.normalizers._language import WORDS, callees, jit, plain, source, speak, tl, torch_words

ARGUMENTS = ("s", "i", "j", "h")
NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Expr, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.Call, ast.Attribute, ast.Name, ast.Constant, ast.expr_context,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr, ast.USub, ast.cmpop,
)  # fmt: skip
SCORES = tuple(sign * (math.sqrt(2.0) ** at) for at in range(-19, 12, 2) for sign in (-1, 1))  # where few have a kink
PLACES = ((0, 0), (1, 0), (0, 1), (5, 2), (2, 5), (100, 37), (9, 4000))  # (i, j)
RANDOM_HEADS, RANDOM_PLACES = 128, 1024  # where slopes are compared too: heads if no parameter has one per head
_made: dict[str, ScoreFunction] = {}


@dataclass(frozen=True, eq=False)  # compared by identity: kernels are kept by record
class ScoreFunction:
    """s ← value(s, i, j, h, *params), with slope(s, i, j, h, *params) = ∂value/∂s, as an option of `regard.attention`.

    >>> import regard, torch
    >>> from regard.normalizers import jit, tl
    >>> @jit
    ... def fade(s, i, j, h, rate):
    ...     return s - rate * tl.log(1.0 + tl.abs(i - j))
    >>> @jit
    ... def fade_slope(s, i, j, h, rate):
    ...     return 1.0
    >>> recent = regard.bias.ScoreFunction(fade, fade_slope, params=(torch.tensor([0.5, 2.0]),))  # one rate per head
    >>> x = torch.randn(1, 2, 6, 8)
    >>> out, stats = regard.attention(x, x, x, is_causal=True, score_mod=recent, return_stats=True)

    Both functions are written with `abs exp exp2 log log2 maximum minimum sqrt where` of `regard.normalizers.tl`,
    + − * /, comparisons joined by & and |, and other `jit` functions. They are compared when the record is made: slope
    must be the derivative of value, and both must be finite.

    A record can be copied, pickled and saved by `torch.save` if both functions can be imported by name, as those at the
    top of a module can.

    Args:
        value: the changed score. s is scale·q·k, before bias, mask and temperature. i and j are the positions of query
            and key as the statistic `distance` counts them: their indices; behind a cache, with
            `Mask.causal(bottom_right=True)`, i + Lk − Lq; in `attention_varlen` j counts all tokens, and i − j is right
            within a document. h is the query head. i, j and h are floats, exact up to 2²⁴.
        slope: the derivative of value with respect to s.
        params: further arguments, each a number, or a tensor (H,) with one number per query head. Tensors that require
            a gradient get one, by the float64 reference.

    Raises:
        TypeError: value or slope is no function, or uses what a backend cannot compute; a parameter is no number.
        ValueError: slope is not the derivative of value, a number is not finite, or a parameter has another shape.
    """

    value: Any
    slope: Any
    params: tuple[float | Tensor, ...] = ()
    key: str = field(init=False)  # name and hash of the text: what a custom op carries
    _spoken: tuple[Any, Any] = field(init=False, repr=False)  # value and slope in torch

    def __post_init__(self) -> None:
        params = self.params if isinstance(self.params, (tuple, list)) else (self.params,)
        object.__setattr__(self, "params", tuple(_check_param(at, x) for at, x in enumerate(params)))
        for name in ("value", "slope"):
            function = getattr(self, name)
            _check_text(function, name, len(self.params))
            object.__setattr__(self, name, function if hasattr(function, "fn") else jit(function))
        texts = "\n".join(f"{key}\n{text}" for key, text in _texts(self.value, self.slope))
        object.__setattr__(self, "key", f"{self.name}:{hashlib.sha256(texts.encode()).hexdigest()[:16]}")
        object.__setattr__(self, "_spoken", tuple(speak(x, torch_words) for x in (self.value, self.slope)))
        with torch.device("cpu"), torch.inference_mode(False):
            self._check()
        _made[self.key] = self.with_params(*(1.0 for _ in self.params))  # keeps no tensor

    @classmethod
    def soft_cap(cls, cap: float | Tensor) -> ScoreFunction:
        """c·tanh(s/c), the identity near 0 and never beyond ±c; of one number the same call as `softcap=cap`.

        >>> import regard
        >>> regard.bias.ScoreFunction.soft_cap(50.0)
        ScoreFunction(cap_score, params=[50])
        """
        least = min(_readable(cap), default=1.0) if isinstance(cap, Tensor) and cap.ndim else _readable(cap)
        if isinstance(least, numbers.Real) and not float(least) > 0:
            raise ValueError(f"cap must be positive, got {float(least):g}")
        return cls(cap_score, cap_score_slope, (cap,))

    @property
    def name(self) -> str:
        """The name of `value`."""
        return plain(self.value).__name__

    @property
    def softcap(self) -> float | None:
        """c of a soft cap that is one number, which every kernel computes; None for other functions."""
        is_cap = self.value is cap_score and not isinstance(self.params[0], Tensor)
        return self.params[0] if is_cap else None  # type: ignore[return-value]

    def with_params(self, *params: float | Tensor) -> ScoreFunction:
        """Return the same function with other parameters.

        >>> import regard
        >>> regard.bias.ScoreFunction.soft_cap(50.0).with_params(30.0).params
        (30.0,)
        """
        if len(params) != len(self.params):
            raise ValueError(f"{self.name} takes {len(self.params)} params, got {len(params)}")
        other = object.__new__(ScoreFunction)  # neither function is checked again
        other.__dict__.update(self.__dict__)
        object.__setattr__(other, "params", tuple(_check_param(at, x) for at, x in enumerate(params)))
        return other

    def stack_params(self, heads: int, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the parameters as [P, heads] on the device of `like`; None if there are none."""
        rows = []
        for at, x in enumerate(self.params):
            if not isinstance(x, Tensor):
                rows.append(torch.full((heads,), x, dtype=dtype, device=like.device))  # not mapped by vmap
                continue
            if x.device != like.device and x.ndim:
                raise ValueError(f"params[{at}] of score_mod must be on q's device {like.device}, got {x.device}")
            if x.ndim and x.shape[0] not in (1, heads):
                raise ValueError(f"params[{at}] of score_mod must have shape ({heads},), got {tuple(x.shape)}")
            rows.append(x.to(like.device, dtype).expand(heads))
        return torch.stack(rows) if rows else None

    def modify(self, s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return value(s, i, j, h, *params) of scores s (…, H, M, N), by torch; i and j broadcast to (M, N).

        >>> import regard, torch
        >>> cap = regard.bias.ScoreFunction.soft_cap(2.0)
        >>> cap.modify(torch.tensor([[0.0, 1e3]]), torch.zeros(1, 1), torch.arange(2))
        tensor([[0., 2.]])
        """
        heads = s.shape[-3] if s.ndim > 2 else 1
        params = self.stack_params(heads, s, s.dtype)
        shape = (heads, 1, 1) if s.ndim > 2 else (1, 1)
        h = torch.arange(heads, device=s.device).to(s.dtype).view(shape)
        given = () if params is None else (x.view(shape) for x in params)
        return torch.as_tensor(self._spoken[0](s, i.to(s.dtype), j.to(s.dtype), h, *given)).to(s).expand(s.shape)

    def _check(self) -> None:
        """Raise unless slope is the derivative of value, and both are finite.

        Slopes are compared at random places and, unless a parameter has one number per head, up to RANDOM_HEADS heads;
        at `PLACES` of the first heads both functions must be finite too.
        """
        rows = [torch.as_tensor(_readable(x), dtype=torch.float64).reshape(-1) for x in self.params]
        own = max((len(x) for x in rows), default=1)
        heads, sure = (own, own) if own > 1 else (RANDOM_HEADS, 2)
        params = [x.expand(heads).view(-1, 1, 1) for x in rows]
        h = torch.arange(heads, dtype=torch.float64).view(-1, 1, 1)
        i, j = (x[..., None] for x in _probe_places(heads).unbind(-1))
        with torch.enable_grad():
            s = torch.tensor([0.0, *SCORES], dtype=torch.float64).expand(*i.shape[:2], -1).clone()
            s.requires_grad_()
            found, slope = (self._compute(at, s, i, j, h, *params) for at in (0, 1))
            exact = torch.zeros_like(s)
            if found.requires_grad:
                (exact,) = torch.autograd.grad(found.sum(), s)
        s, found, slope = s.detach(), found.detach(), slope.detach()
        for name, x in (("value", found), ("slope", slope), ("the derivative of value", exact)):
            bad = ~x[:sure, : len(PLACES)].isfinite()
            if bool(bad.any()):
                where = float(s[:sure, : len(PLACES)][bad][0])
                raise ValueError(f"score_mod {self.name}: {name} is not finite at s = {where:g} with these params")
        wrong = exact.isfinite() & ~torch.isclose(slope, exact, rtol=1e-6, atol=1e-9)
        wrong[..., 0] = False  # at 0 |s| has no derivative
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())  # head, place, score
            raise ValueError(
                f"score_mod {self.name}: slope is {float(slope[at]):g} at s = {float(s[at]):g}, i = {int(i[at[:2]])}, "
                f"j = {int(j[at[:2]])}, h = {at[0]}, where the derivative of value is {float(exact[at]):g}"
            )

    def _compute(self, at: int, s: Tensor, *given: Tensor) -> Tensor:
        name = ("value", "slope")[at]
        try:
            return torch.as_tensor(self._spoken[at](s, *given), dtype=s.dtype).expand(s.shape)
        except (TypeError, RuntimeError, ArithmeticError) as error:
            raise TypeError(f"{name} of score_mod {self.name} fails: {error}") from error

    def __deepcopy__(self, memo: dict) -> ScoreFunction:
        return self.with_params(*copy.deepcopy(self.params, memo))

    def __copy__(self) -> ScoreFunction:
        return self.with_params(*self.params)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _load, (_find_path(self.value, "value"), _find_path(self.slope, "slope"), self.params)

    def __repr__(self) -> str:
        given = ", ".join(f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x:g}" for x in self.params)
        return f"ScoreFunction({self.name}, params=[{given}])"


def find(key: str) -> ScoreFunction:
    """Return the function with this key, made in this process: a saved graph needs the file that makes it."""
    if key not in _made:
        raise LookupError(f"score_mod {key} is not known in this process; make its regard.bias.ScoreFunction first")
    return _made[key]


def _load(value: tuple[str, str], slope: tuple[str, str], params: tuple[float | Tensor, ...]) -> ScoreFunction:
    """The record of functions at these (module, name): what a pickled one becomes."""
    return ScoreFunction(_import(*value), _import(*slope), params)


def _import(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _find_path(function: Any, name: str) -> tuple[str, str]:
    """Return the (module, name) that a function can be imported by; one inside another function has none."""
    body = plain(function)
    path = body.__module__, body.__qualname__
    try:
        is_found = plain(_import(*path)) is body
    except (ImportError, AttributeError):
        is_found = False
    if not is_found:
        raise TypeError(
            f"{name} of this ScoreFunction, {'.'.join(path)}, cannot be imported by name; define it at a module's top"
        )
    return path


def _probe_places(heads: int) -> Tensor:
    """(i, j) where slopes are compared, [heads, places, 2]: PLACES, then random ones, near and far, of each head."""
    count = -(-RANDOM_PLACES // heads)
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** (17.0 * torch.rand(heads, count, 2, generator=generator, dtype=torch.float64))  # 1 … 131072
    first, away = size.unbind(-1)
    is_ahead = torch.rand(heads, count, generator=generator) < 0.5
    second = torch.where(is_ahead, first + away, (first - away).clamp(min=0.0))
    fixed = torch.tensor(PLACES, dtype=torch.float64).expand(heads, -1, -1)
    return torch.cat([fixed, torch.stack([first, second], -1).floor()], 1)


def _check_param(at: int, x: Any) -> float | Tensor:
    if isinstance(x, Tensor):
        if not x.is_floating_point() or x.ndim > 1 or not x.numel():
            raise ValueError(f"params[{at}] must be a number or a float tensor (H,), got {tuple(x.shape)} {x.dtype}")
        return x
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"params[{at}] must be a number or a float tensor (H,), got {type(x).__name__}")
    if not math.isfinite(x):
        raise ValueError(f"params[{at}] must be finite, got {x!r}")
    return float(x)


def _readable(x: float | Tensor) -> Any:
    """The numbers of a parameter; 1 where its values cannot be read."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().cpu().tolist() if readable(x) else [1.0] * x.numel()


def _texts(*functions: Any) -> Iterator[tuple[str, str]]:
    """(name, text) of each function and of those that it calls."""
    for function in functions:
        yield plain(function).__name__, source(function)
        yield from _texts(*callees(function).values())


def _check_text(function: Any, name: str, count: int) -> None:
    """Raise unless every backend can compute the function."""
    body = plain(function)
    if not isinstance(body, FunctionType) or body.__name__ == "<lambda>":
        raise TypeError(f"{name} must be a function made by def, got {type(body).__name__} {function!r:.60}")
    code = body.__code__
    has_rest = code.co_flags & 0x0C or code.co_kwonlyargcount or body.__defaults__
    if has_rest or code.co_argcount != len(ARGUMENTS) + count:
        wanted = ", ".join([*ARGUMENTS, *(f"param{at}" for at in range(count))])
        got = ", ".join(code.co_varnames[: code.co_argcount])
        raise TypeError(f"{name} must take ({wanted}), no defaults, got {body.__name__}({got})")
    _check_body(body, name)


def _check_body(body: FunctionType, name: str) -> None:
    try:
        tree = ast.parse(source(body))
    except (OSError, SyntaxError) as error:
        raise TypeError(f"{name}: the text of {body.__name__} is not found; define it in a file or notebook") from error
    called, own = callees(body), set(body.__code__.co_varnames)
    functions = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        bad = None
        if not isinstance(node, NODES) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
            bad = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else type(node).__name__
        elif isinstance(node, ast.Attribute):
            is_word = isinstance(node.value, ast.Name) and node.value.id == "tl" and node.attr in WORDS
            bad = None if is_word else ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id not in own | {"tl"}:
            bad = None if node in functions and node.id in called else node.id
        if bad is not None:
            raise TypeError(
                f"{name}: {body.__name__} uses {bad!r}, which not every backend computes; use + - * /, comparisons "
                f"with & and |, jit functions, params, and of tl {', '.join(WORDS)}"
            )
    for callee, function in called.items():
        if not hasattr(function, "fn") and not isinstance(tl, SimpleNamespace):  # Triton calls no other
            raise TypeError(f"{name}: {callee}, which {body.__name__} calls, must be a regard.normalizers.jit function")
        _check_body(plain(function), name)


@jit
def tanh(x):
    """Compute (1 − e)/(1 + e), e = exp(−2|x|); near 0 a convergent of x/(1 + x²/(3 + x²/(5 + …)))."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    near = tl.minimum(size, 0.25)
    square = near * near
    above = tl.where(size < 0.25, near * (10395.0 + square * (1260.0 + square * 21.0)), 1.0 - e)
    below = tl.where(size < 0.25, 10395.0 + square * (4725.0 + square * (210.0 + square)), 1.0 + e)
    t = above / below
    return tl.where(x < 0.0, -t, t)


@jit
def cap_score(s, i, j, h, cap):
    """Compute c·tanh(s/c)."""
    return cap * tanh(s / cap)


@jit
def cap_score_slope(s, i, j, h, cap):
    """Compute 1 − tanh²(s/c)."""
    t = tanh(s / cap)
    return 1.0 - t * t
