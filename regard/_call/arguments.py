"""The options of attention, each declared once, and `takes_options`, which binds the arguments of a call to them.

A new option is one line of `AttentionOptions` (name, type, default, how it enters the key of a call seen before), one
line of `Keywords`, its words in the docstring of `regard.attention`, and a line of `_core/prepare.py` that checks it
and gives it to the `Problem`. Every function that takes the options of `regard.attention` has it then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from regard._call.mask.mask import Mask
from regard._call.score_function import ScoreFunction
from regard._facts import remember
from regard.bias import Bias
from regard.normalizers import Choice

AttnMask = Tensor | Mask | Bias | tuple[Tensor | Mask | None, Tensor | Bias | None] | None
Scale = float | str | Tensor | None
Temperature = float | Tensor | Callable[..., Tensor] | None
Window = tuple[int | None, int | None] | None
Lengths = Tensor | Sequence[int] | None
Wanted = bool | str | Sequence[str]
Result = TypeVar("Result")


class Kept:
    """How an option enters the key of a call: by value where its type is one of `types`, or by what `mark` makes of it.

    `mark` returns None for a value that no call is kept with. None itself always is kept; any other type is not.
    """

    def __init__(
        self, *types: type, mark: Callable | None = None, of: type | None = None, by_layer: bool = False
    ) -> None:
        self.marks: dict = dict.fromkeys((type(None), *types)) | ({} if of is None else {of: mark})
        self.by_layer = by_layer  # a module of `regard.nn` takes it, and gives it to each of its calls


def _parts(mask: Mask) -> Hashable:
    return mask.parts if mask.has_plan else None


def _sides(window: tuple) -> Hashable:
    return window if all(type(side) in (int, type(None)) for side in window) else None


def _names(wanted: tuple) -> Hashable:
    return wanted if all(type(name) is str for name in wanted) else None


def _layout(x: Tensor) -> Hashable:
    return x.shape, x.dtype, x.device, x.layout


class AttentionOptions(NamedTuple):
    """The arguments of `regard.attention` after q, k and v, in the order of its signature: torch's five, then ours.

    >>> AttentionOptions(is_causal=True)._replace(normalizer="entmax15").normalizer
    'entmax15'
    """

    attn_mask: Annotated[AttnMask, Kept(mark=_parts, of=Mask)] = None
    dropout_p: Annotated[float, Kept(float, int)] = 0.0
    is_causal: Annotated[bool, Kept(bool)] = False
    scale: Annotated[Scale, Kept(float, int, str)] = None
    enable_gqa: Annotated[bool, Kept(bool)] = False
    normalizer: Annotated[str | Choice, Kept(str)] = "softmax"
    temperature: Annotated[Temperature, Kept(float, int)] = None
    softcap: Annotated[float | None, Kept(float, int, by_layer=True)] = None
    score_mod: Annotated[ScoreFunction | None, Kept(by_layer=True)] = None
    sink: Annotated[float | Tensor | None, Kept()] = None
    window: Annotated[Window, Kept(mark=_sides, of=tuple)] = None
    key_lengths: Annotated[Lengths, Kept()] = None
    gate: Annotated[Tensor | None, Kept(mark=_layout, of=Tensor)] = None
    return_stats: Annotated[Wanted, Kept(bool, str, mark=_names, of=tuple)] = False
    backend: Annotated[str | None, Kept(str)] = None


class Keywords(TypedDict, total=False):
    """The keyword options for a type checker, without `return_stats`, on which the type of the result depends."""

    normalizer: str | Choice
    temperature: Temperature
    softcap: float | None
    score_mod: ScoreFunction | None
    sink: float | Tensor | None
    window: Window
    key_lengths: Lengths
    gate: Tensor | None
    backend: str | None


POSITIONAL = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # as in torch
ORDER = ("q", "k", "v", *POSITIONAL)
KNOWN = frozenset(AttentionOptions._fields)
TORCH_NAMES = {"query": "q", "key": "k", "value": "v"}
OTHER_NAMES = {  # what other libraries, and British English, call our arguments
    "causal": "is_causal", "mask": "attn_mask", "normaliser": "normalizer", "soft_cap": "softcap",
    "logits_soft_cap": "softcap", "window_size": "window", "sliding_window": "window", "stats": "return_stats",
}  # fmt: skip


def find_kept(declaration: Any) -> list[Kept]:
    """How each field of a declaration enters keys; one that does not say so is refused."""
    hints = get_type_hints(declaration, include_extras=True)
    for name in declaration._fields:
        if not any(isinstance(x, Kept) for x in getattr(hints[name], "__metadata__", ())):
            raise TypeError(f"option {name!r} does not say how keys know it: Annotated[…, Kept(…)]")
    return [next(x for x in hints[name].__metadata__ if isinstance(x, Kept)) for name in declaration._fields]


KEPT = find_kept(AttentionOptions)
BY_LAYER = tuple(name for name, own in zip(AttentionOptions._fields, KEPT, strict=True) if own.by_layer)
MAX_KINDS = 256
_kinds: dict[tuple[type, ...], tuple | None] = {}  # of options: None, or what stands for these types, and their marks


def key_of(options: tuple, kept: Sequence[Kept] = KEPT) -> Hashable | None:
    """The part of a call's key that its options are; None for options that no call is kept with."""
    types = tuple(map(type, options))
    if types not in _kinds:
        pairs = [(own.marks, kind) for own, kind in zip(kept, types, strict=True)]
        known = all(kind in own for own, kind in pairs)
        marks = [(at, own[kind]) for at, (own, kind) in enumerate(pairs) if own.get(kind)]
        remember(_kinds, types, (object(), marks) if known else None, MAX_KINDS)
    found = _kinds[types]
    if found is None:
        return None
    token, marks = found
    values: Any = options
    if marks:
        values = list(options)
        for at, mark in marks:
            values[at] = mark(values[at])
            if values[at] is None:
                return None
        values = tuple(values)
    return token, values


def takes_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Give function(q, k, v, options, *, …) the arguments of `regard.attention` in the place of `options`."""
    name = function.__qualname__
    own = {x.name: x for x in list(inspect.signature(function).parameters.values())[4:]}

    def bind(args: tuple, kwargs: dict) -> tuple[list, dict]:
        if len(args) > len(ORDER):
            raise TypeError(f"{name}() takes {len(ORDER)} positional arguments but {len(args)} were given")
        given = dict(zip(ORDER, args, strict=False))
        for theirs, x in kwargs.items():
            ours = check_name(name, theirs, (*ORDER, *AttentionOptions._fields, *own), given)
            given[ours] = x
        for needed in ORDER[:3]:
            if needed not in given:
                raise TypeError(f"{name}() missing a required argument: {needed!r}")
        options = {x: value for x, value in given.items() if x in KNOWN}
        others = {x: value for x, value in given.items() if x in own}
        return [given["q"], given["k"], given["v"], AttentionOptions(**options)], others

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        plain = 3 <= len(args) <= len(ORDER)
        for given in kwargs:
            plain = plain and given in KNOWN and not (len(args) > 3 and given in ORDER[: len(args)])
        if not plain:
            args, kwargs = bind(args, kwargs)  # type: ignore[assignment]
            return function(*args, **kwargs)
        q, k, v, *positional = args
        return function(q, k, v, AttentionOptions(*positional, **kwargs))

    shown = call.__signature__ = make_signature(function, own)  # type: ignore[attr-defined]
    call.__annotations__ = {x.name: x.annotation for x in shown.parameters.values()}
    return call


def make_signature(function: Callable, own: dict[str, inspect.Parameter]) -> inspect.Signature:
    """The signature that `help` shows: q, k, v, torch's arguments, the function's own and ours."""
    hints = get_type_hints(AttentionOptions)

    def parameter(name: str) -> inspect.Parameter:
        by = inspect.Parameter.POSITIONAL_OR_KEYWORD if name in POSITIONAL else inspect.Parameter.KEYWORD_ONLY
        default = AttentionOptions._field_defaults[name]
        return inspect.Parameter(name, by, default=default, annotation=hints[name])

    tensors = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for x in "qkv"]
    keywords = [parameter(name) for name in AttentionOptions._fields if name not in POSITIONAL]
    given = [*tensors, *map(parameter, POSITIONAL), *own.values(), *keywords]
    return inspect.Signature(given, return_annotation=inspect.signature(function).return_annotation)


def check_name(function: str, name: str, known: Sequence[str], given: dict) -> str:
    """Return our name of an argument; raise for one that is given twice, unknown or another library's."""
    ours = TORCH_NAMES.get(name, name)
    if ours not in known:
        if OTHER_NAMES.get(name) in known:
            hint = "=(sliding_window − 1, 0)" if name == "sliding_window" else ""
            raise TypeError(f"{function} has no argument {name!r}; it is called {OTHER_NAMES[name]!r} here{hint}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    if ours in given:
        raise TypeError(f"{function} got both {ours} and {name}; give one of them" if ours != name else
                        f"{function}() got multiple values for argument {name!r}")  # fmt: skip
    return ours
