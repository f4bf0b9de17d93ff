"""Two runs of one model that should agree: which attention call differs first, and what of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from regard.health.probe.probe import CapturedCall, Key, relative_change

Calls = Mapping[Key, CapturedCall]

INPUTS, POSITIONS, TWICE, LOST, SEEN, STORED, KERNEL = (
    "inputs", "positions", "rotated again", "keys lost", "keys seen", "keys stored", "kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Why a step of decoding differs from the full forward: the first call that does, what of it, and how."""

    what: str  # one of the names above
    key: Key
    text: str


def explain_step(full: Calls, step: Calls, begin: int, end: int, budget: float) -> Cause | None:
    """Compares the calls of tokens begin … end − 1 behind a cache with those of a forward over all tokens."""
    before = ""
    for key, one in full.items():
        other = step.get(key)
        if other is None or one.call.is_cross(key[0]) or other.q.shape[2] != end - begin or one.q.shape[2] < end:
            continue
        found = _explain_call(one, other, begin, end, budget)
        if found is not None:
            what, text = found
            where = f"in the attention of {key[0] or 'the model itself'}"
            if what == INPUTS and before:
                where = f"between {before} and {key[0]}"
            return Cause(what, key, f"{text} (first {where})")
        before = key[0]
    return None


def explain_mode(own: Calls, other: Calls, budget: float) -> Cause | None:
    """The first attention call that differs between two forwards of one batch, and what of it."""
    before = ""
    for key, one in own.items():
        two = other.get(key)
        where = f"in the attention of {key[0] or 'the model itself'}"
        if two is None:
            return Cause(KERNEL, key, f"nothing was captured {where} there")
        parts = [name for name in "qkv" if _differ(getattr(one, name), getattr(two, name), budget)]
        if len(parts) == 3 and before:
            return Cause(INPUTS, key, f"its input differs, so the difference is between {before} and {key[0]}")
        if parts:
            return Cause(INPUTS, key, f"{' and '.join(parts)} differ first {where}")
        if _differ(one.output, two.output, budget):
            return Cause(KERNEL, key, f"{_explain_output(one, two)} (first {where})")
        before = key[0]
    return None


def _explain_output(one: CapturedCall, two: CapturedCall) -> str:
    """Why two calls with the same q, k and v have other outputs."""
    shape = *one.q.shape[:3], one.k.shape[2]
    seen, other = (int(call.visible.expand(shape)[0, 0].sum()) for call in (one, two))
    if seen != other:
        return f"the same q, k and v, but {seen} visible keys and {other}: the mask differs"
    width = one.q.shape[-1] ** -0.5
    a, b = (call.call.options.get("scale") for call in (one, two))
    a, b = (width if scale is None else scale for scale in (a, b))
    if isinstance(a, float) and isinstance(b, float) and abs(a / b - 1) > 1e-3:
        return f"the same q, k and v, but the scale {a:.4g} and {b:.4g}"
    options = one.call.options, two.call.options
    names = {name for name in {*options[0], *options[1]} if len([1 for one in options if one.get(name) is None]) == 1}
    if names - {"scale"}:
        return f"the same q, k and v, but {' and '.join(sorted(names))} in one of them only"
    return "the same q, k, v, scale and visible keys, but another output: soft cap, sinks, bias or dropout differ"


def _explain_call(
    one: CapturedCall, other: CapturedCall, begin: int, end: int, budget: float
) -> tuple[str, str] | None:
    """(what differs, a sentence) of one layer; None if nothing does."""
    rows, new = slice(begin, end), end - begin
    budget = max(budget, 1e-6)
    is_long = other.v.shape[2] >= new and _has_new_at_end(one, other, end, budget)
    if is_long and _differ(one.v[:, :, rows], other.v[:, :, -new:], budget):
        return INPUTS, "q, k and v of the new tokens differ: the layer's input does"
    q_full, q_step = one.q[:, :, rows], other.q
    if _differ(q_full, q_step, budget):
        if not _differ(q_full.norm(dim=-1), q_step.norm(dim=-1), budget):
            return POSITIONS, "the new queries have equal norms and other angles: they stand at other positions"
        return INPUTS, "the new queries differ, the values do not: a norm or scale of the queries differs"
    seen_full, seen_step = _visible_keys(one, end - 1), _visible_keys(other, -1)
    many, few = len(seen_full), len(seen_step)
    if few != many:
        if few <= end - begin < many:
            return LOST, f"the last query sees {few} keys in decoding and {many} in one forward: keys are not kept"
        return SEEN, f"the last query sees {few} keys in decoding and {many} in one forward"
    k_full, k_step = one.k[:, :, seen_full], other.k[:, :, seen_step]
    if _differ(k_full, k_step, budget):
        old = many - (end - begin)
        new_differ = _differ(k_full[:, :, old:], k_step[:, :, old:], budget)
        old_differ = old > 0 and _differ(k_full[:, :, :old], k_step[:, :, :old], budget)
        if _differ(k_full.norm(dim=-1), k_step.norm(dim=-1), budget):
            return STORED, "the keys of the cache differ from those of one forward, and their norms do too"
        if old_differ and not new_differ:
            return (
                TWICE,
                "the cached keys have equal norms and other angles and the new ones agree: rotated again",
            )
        return POSITIONS, "the keys have equal norms and other angles: they stand at other positions"
    if _differ(one.v[:, :, seen_full], other.v[:, :, seen_step], budget):
        return STORED, "the values of the cache differ from those of one forward"
    if _differ(one.output[:, :, rows], other.output, budget):
        return (
            KERNEL,
            "q, k, v and the visible keys agree, the output does not: scale, soft cap, sinks or bias differ",
        )
    return None


def _has_new_at_end(one: CapturedCall, other: CapturedCall, end: int, budget: float) -> bool:
    """True unless the new value stands elsewhere in the cache, as in one of fixed length."""
    seen = _visible_keys(other, -1)
    return not len(seen) or _differ(one.v[:, :, end - 1 : end], other.v[:, :, seen[-1:]], budget)


def _visible_keys(one: CapturedCall, row: int) -> Tensor:
    """Indices of the keys that a query of the first sequence's first head sees."""
    shape = *one.q.shape[:3], one.k.shape[2]
    return one.visible.expand(shape)[0, 0, row].nonzero().flatten()


def _differ(a: Tensor, b: Tensor, budget: float) -> bool:
    return a.shape != b.shape or relative_change(a, b) > budget
