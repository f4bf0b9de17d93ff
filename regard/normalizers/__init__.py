"""Normalisers: one file each, found by looking.

>>> from regard import normalizers
>>> "sparsemax" in normalizers.names()
True
>>> normalizers.get("entmax(alpha=1.25)").theta
1.25

A file in this folder, or in a folder given to `discover` or named in the environment variable
REGARD_NORMALIZERS, that defines `normalizer = Ratio(...)` (or Pointwise, Threshold, Normalizer) is a member:
rows, attention, the reference, the contract tests, `regard list` and the docs pick it up. The environment's folders are
looked into when all names are asked for, or one that is not of this package.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import numbers
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.normalizers._families import Pointwise, Ratio, Threshold
from regard.normalizers._language import jit, speak, tl, torch_words
from regard.normalizers._record import NEAREST, Normalizer, Parameter

__all__ = ["Normalizer", "Parameter", "Pointwise", "Ratio", "Threshold", "discover", "get", "jit", "names", "tl"]

_members: dict[str, Normalizer] = {}
_files: dict[str, Path] = {}  # where each was found
_discoveries: list[str] = []  # every name that was found, in order
_waiting = [folder for folder in os.environ.get("REGARD_NORMALIZERS", "").split(os.pathsep) if folder]


class BrokenFile(ValueError):
    """A folder or file of normalisers that cannot be used: which, and why."""


@dataclass(frozen=True)
class Choice:
    """A normaliser with its parameter filled in: what a name such as "entmax(alpha=1.25)" means.

    The parameter is a number, a tensor, or a function that maps the numbers of visible keys (…, Lq) to a tensor.
    """

    normalizer: Normalizer
    theta: float | Tensor | Callable[[Tensor], Tensor] | None

    def __getattr__(self, field):  # name, formula, family, … are the normaliser's
        if field.startswith("__"):
            raise AttributeError(field)
        return getattr(self.normalizer, field)

    @property
    def fused(self) -> bool:
        """True if the fused row kernels take this parameter; below `fused_low` only where a wider dtype helps."""
        parameter = self.normalizer.parameter
        if parameter is None or not isinstance(self.theta, float) or not self.normalizer.fused:
            return self.normalizer.fused
        return self.theta <= parameter.fused_high and not parameter.wide_below <= self.theta < parameter.fused_low

    @property
    def fused_in_attention(self) -> bool:
        """True if fused attention takes it; unlike rows it has no wider dtype to switch to."""
        parameter = self.normalizer.parameter
        if parameter is None or not isinstance(self.theta, float):
            return self.fused
        return self.fused and self.theta >= parameter.fused_low

    @property
    def merges(self) -> bool:
        """True if the sums of `statistics.State` give its statistics: a larger score must never weigh less."""
        return self.normalizer.rises and self.fused

    @property
    def softmax_family(self) -> bool:
        """True if p = exp(s) / Z: then a sink may join Z, and some statistics carry gradients."""
        return isinstance(self.normalizer, Ratio) and self.normalizer.exponential

    @property
    def has_potential(self) -> bool:
        """True if the map is the gradient of a potential, p = argmax_p p·s + H_α(p): then it has a loss."""
        is_softmax = self.softmax_family and self.sums_to == "1"
        return is_softmax or (isinstance(self.normalizer, Threshold) and self.normalizer.is_power)

    def entropy_index(self, theta: Any = None) -> Any:
        """α of a map that is argmax_p p·s + H_α(p), and None for others. A tensor `theta` gives a tensor.

        It is 1 for softmax and 1 + gain for max(gain·s − τ, 0)^(1/gain). H_α(p) = Σ (p − p^α) / (α(α − 1)), and
        Shannon's entropy for α = 1.
        """
        if not self.has_potential:
            return None
        if not isinstance(self.normalizer, Threshold):
            return 1.0
        theta = self.theta if theta is None else theta
        return 1.0 + speak(self.normalizer.gain, torch_words)(0.0 if theta is None else theta)

    @property
    def is_shift_invariant(self) -> bool:
        """True if a number added to all scores of a row changes no weight: softmax and the threshold maps."""
        return self.family == "threshold" or (self.softmax_family and self.sums_to == "1")

    @property
    def simplest(self) -> Choice:
        """This choice, or "softmax" where its parameter makes it softmax, as "entmax(alpha=1)"."""
        parameter = self.normalizer.parameter
        if parameter is None or parameter.softmax_at is None or not isinstance(self.theta, float):
            return self
        return get("softmax") if abs(self.theta - parameter.softmax_at) < NEAREST else self

    @property
    def spec(self) -> str:
        """The name that `get` reads back as this choice."""
        parameter, theta = self.normalizer.parameter, self.theta
        if parameter is None or (isinstance(theta, float) and theta == parameter.default):
            return self.normalizer.name
        if isinstance(theta, float):
            return f"{self.normalizer.name}({parameter.name}={theta!r})"
        named = [name for name, function in parameter.by_keys.items() if function is theta]
        return f"{self.normalizer.name}({parameter.name}={named[0] if named else '…'})"

    def check_spec(self, caller: str) -> None:
        """Raise unless `spec` names this choice: `caller` passes a name on, which cannot carry a tensor."""
        parameter = self.normalizer.parameter
        if parameter is not None and self.spec.endswith("=…)"):
            name = parameter.name
            raise ValueError(f"normalizer: {caller} takes a number for {name}, got a {type(self.theta).__name__}")

    @property
    def plain(self) -> Choice:
        """This choice with its parameter's default for a tensor or a function, which then travels beside it."""
        parameter = self.normalizer.parameter
        return (
            self if parameter is None or isinstance(self.theta, float) else Choice(self.normalizer, parameter.default)
        )


def discover(folder: str | os.PathLike[str]) -> list[str]:
    """Load every `*.py` file of a folder that defines `normalizer`.

    Returns:
        The names that were found.

    Raises:
        BrokenFile: The folder does not exist, a file cannot be loaded or defines no normaliser, or a name is taken.
    """
    folder = Path(folder).resolve()
    if not folder.is_dir():
        raise BrokenFile(f"folder must be an existing directory, got {str(folder)!r}")
    found = []
    for path in sorted(folder.glob("[!_]*.py")):
        member = _loaded(path)
        if not isinstance(member, Normalizer):
            raise BrokenFile(f"{path} must define `normalizer`, a Pointwise, Ratio, Threshold or Normalizer record")
        if member.name in _members and _files.get(member.name) != path:
            raise BrokenFile(f"{path}: the name {member.name!r} is taken by {_files.get(member.name)}; choose another")
        _members[member.name], _files[member.name] = member, path
        _discoveries.append(member.name)
        found.append(member.name)
    return found


def _loaded(path: Path) -> Normalizer | None:
    if path.parent == Path(__file__).resolve().parent:
        return getattr(importlib.import_module(f"regard.normalizers.{path.stem}"), "normalizer", None)
    spec = importlib.util.spec_from_file_location(f"regard_normalizer_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # of a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as wrong:
        del sys.modules[spec.name]
        raise BrokenFile(f"{path} cannot be loaded: {type(wrong).__name__}: {wrong}") from wrong
    return getattr(module, "normalizer", None)


def _look_around() -> None:
    """Load the folders that the environment names; one that is broken is told each time."""
    while _waiting:
        discover(_waiting[0])
        del _waiting[0]


def names() -> list[str]:
    """The names of all normalisers known, sorted."""
    _look_around()
    return sorted(_members)


def generation() -> int:
    """Number of normalisers found so far; caches by name are out of date when it has changed."""
    return len(_discoveries)


def file_of(name: str) -> Path:
    """The file that defines the normaliser of this name."""
    return _files[get(name).name]


_SPEC = re.compile(r"\s*(\w+)\s*(?:\(\s*(?:(\w+)\s*=\s*)?([^()=,]+?(?:\(\w+\))?)\s*\))?\s*")


def get(spec: str | Choice | Normalizer, **parameter: float | Tensor | Callable[[Tensor], Tensor]) -> Choice:
    """The normaliser called by name, with its parameter: "softmax", "entmax(alpha=1.25)", "sigmoid(bias=-log(n))".

    The parameter may also come by its keyword: as a number, as a tensor, which receives gradients, or as a function
    of n (…, Lq), the number of keys that each row sees.

    >>> import regard, torch
    >>> alpha = torch.tensor([1.25, 1.5, 2.0], requires_grad=True)  # one per head
    >>> q = k = v = torch.eye(3).repeat(1, 3, 1, 1)
    >>> out = regard.attention(q, k, v, normalizer=regard.normalizers.get("entmax", alpha=alpha))
    >>> out[0, :, 0, 0].detach()
    tensor([0.5136, 0.5678, 0.7182])

    Returns:
        A `Choice`: the record and the value of its parameter.

    Raises:
        TypeError: `spec` is not a name, or the normaliser takes no parameter of this name.
        ValueError: The name is unknown, or its parameter cannot be read or lies outside its range.
    """
    if parameter:
        return _with_parameter(get(spec), parameter)
    if isinstance(spec, Choice):
        return spec
    if isinstance(spec, Normalizer):
        if _members.get(spec.name) is not spec:  # kernels find it by its name
            raise ValueError(
                f"normalizer {spec.name!r}: this record is not the one known by its name; put it into a file and call "
                "regard.normalizers.discover(folder)"
            )
        spec = spec.name
    if not isinstance(spec, str):
        raise TypeError(f"normalizer must be a name such as 'softmax', got {type(spec).__name__}")
    match = _SPEC.fullmatch(spec)
    name = match.group(1) if match else spec.split("(")[0].strip()
    if name not in _members:
        _look_around()
    if name not in _members:
        near = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names())}"
        raise ValueError(f"normalizer {spec!r} is unknown; {hint}")
    member = _members[name]
    takes = member.parameter
    if match is None:
        form = f"{name}({takes.name}=…)" if takes else name
        raise ValueError(f"normalizer {spec!r} cannot be read; write it as {form!r}")
    given_name, given = match.group(2), match.group(3)
    if given is None:
        return Choice(member, takes.default if takes else None)
    if takes is None:
        raise ValueError(f"normalizer {spec!r}: {name} takes no parameter; write {name!r}")
    if given_name not in (None, takes.name):
        raise ValueError(f"normalizer {spec!r}: {name} takes {takes.name!r}, not {given_name!r}")
    if given in takes.by_keys:
        return Choice(member, takes.by_keys[given])
    try:
        number = float(given.replace("_", "?"))  # Python reads 1_5 as 15
    except ValueError:
        words = "".join(f" or {word!r}" for word in takes.by_keys)
        hint = f"; regard.nn.MultiheadAttention learns it, get({name!r}, {takes.name}=tensor) takes one of yours"
        hint = hint if given == LEARNED else ""
        raise ValueError(f"normalizer {spec!r}: {takes.name} must be a number{words}, got {given!r}{hint}") from None
    return Choice(member, takes.check(number))


LEARNED = "learned"  # the word for a parameter that a module learns


def _with_parameter(choice: Choice, given: dict[str, Any]) -> Choice:
    takes = choice.normalizer.parameter
    if takes is None or list(given) != [takes.name]:
        form = f"takes {takes.name!r}" if takes else "takes no parameter"
        raise TypeError(f"normalizer {choice.name!r} {form}, got {', '.join(map(repr, given))}")
    (value,) = given.values()
    if isinstance(value, Tensor) or (callable(value) and not isinstance(value, type)):
        return Choice(choice.normalizer, value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kinds = "a number, a tensor or a function of the visible keys"
        raise TypeError(f"{takes.name} must be {kinds}, got {type(value).__name__}")
    return Choice(choice.normalizer, takes.check(float(value)))


def learned(spec: Any) -> Choice | None:
    """The choice whose parameter a module shall learn, as "entmax(alpha=learned)" says; None of another name."""
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None or match.group(3) != LEARNED:
        return None
    choice = get(match.group(1))
    takes = choice.normalizer.parameter
    if takes is None or choice.normalizer.parameter_slope is None or match.group(2) not in (None, takes.name):
        known = [get(name) for name in names()]
        can = [f"{c.name}({c.parameter.name}={LEARNED})" for c in known if c.parameter_slope is not None]
        raise ValueError(f"normalizer {spec!r} cannot be learned; known: {', '.join(map(repr, can))}")
    return choice


def record(name: str) -> Normalizer:
    """The record known by a name."""
    return get(name).normalizer


discover(Path(__file__).parent)
