"""A normaliser's tile functions as one constexpr argument: kernel[grid](…, F=bundle.of(choice)).

Inside the kernel `F.numerator(e, s, c)` is inlined, and `F.family`, `F.shift`, `F.order` fold at compile time.

>>> from regard import normalizers
>>> from regard._backends.gpu import bundle
>>> F = bundle.of(normalizers.get("softmax"))
>>> F.family, F.shift, F.gain
('ratio', 'max', None)

Triton's disk cache keys a constexpr by its `cache_key` where it has one and by `str` otherwise; `str` of a function
does not change when its body does. So a bundle joins its members' keys, which hash their text and that of what they
call: after an edit of a normaliser's file no stale binary can answer.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from regard._call.score_function import ScoreFunction
from regard.normalizers import Choice, Normalizer
from regard.normalizers._language import source, speak, tl


class Bundle(NamedTuple):
    """A normaliser's tile functions under the names of `_families`; None where the family has no such function.

    Only `value` is called `weigh` here, because to Triton `F.value` is the constexpr's own content.
    """

    family: str
    cache_key: str
    weigh: Any = None
    slope: Any = None
    slope_of_weight: Any = None
    numerator: Any = None
    numerator_slope: Any = None
    denominator: Any = None
    denominator_slope: Any = None
    rest: Any = None
    gain: Any = None
    log_odds: Any = None
    parameter_slope: Any = None
    signed: Any = None
    shift: str | None = None
    exponential: bool | None = None
    order: int | None = None
    differs: bool = False  # follows from the functions: no part of the key
    is_power: bool = False  # likewise

    def __repr__(self) -> str:
        return f"Bundle({self.family}, {self.cache_key})"

    def __hash__(self) -> int:
        return hash(self.cache_key)


class ScoreBundle(NamedTuple):
    """A score function's tile functions; None without one."""

    cache_key: str = ""
    modify: Any = None
    slope: Any = None
    count: int = 0  # of parameters

    def __repr__(self) -> str:
        return f"ScoreBundle({self.cache_key})"

    def __hash__(self) -> int:
        return hash(self.cache_key)


_scores: dict[str, ScoreBundle] = {}
_made: dict[int, tuple[Normalizer, Bundle]] = {}  # the normaliser is kept, so that its id stays its own


def of(choice: Choice | Normalizer) -> Bundle:
    """Return the bundle of a normaliser; its parameter θ stays a kernel argument."""
    normalizer = choice.normalizer if isinstance(choice, Choice) else choice
    if id(normalizer) not in _made:
        _made[id(normalizer)] = normalizer, _bundle(normalizer)
    return _made[id(normalizer)][1]


def of_score(score: ScoreFunction | None) -> ScoreBundle:
    """Return the bundle of a score function; its parameters stay kernel arguments."""
    if score is None:
        return ScoreBundle()
    if score.key not in _scores:
        from triton import knobs

        value, slope = score.value, score.slope
        if knobs.runtime.interpret:
            value, slope = speak(value, tl), speak(slope, tl)
        _scores[score.key] = ScoreBundle(score.key, value, slope, len(score.params))
    return _scores[score.key]


def _bundle(normalizer: Normalizer) -> Bundle:
    try:
        from triton import knobs
    except ImportError:
        raise ImportError("the Triton kernels need the package triton: pip install triton") from None
    if not normalizer.fused:
        raise ValueError(f"normalizer {normalizer.name!r} has no fused kernels; use the reference")
    members, keys = {}, [normalizer.family]
    for name in Bundle._fields[2:-2]:
        member = getattr(normalizer, "value" if name == "weigh" else name, None)
        if callable(member) and knobs.runtime.interpret:
            member = speak(member, tl)  # plain Python, with triton.language in scope whether its file imports it or not
            keys.append(f"{name}={source(member)}")
        else:
            keys.append(f"{name}={getattr(member, 'cache_key', member)}")
        members[name] = member
    key = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    known = {name: getattr(normalizer, name, False) for name in ("differs", "is_power")}
    return Bundle(normalizer.family, key, **members, **known)
