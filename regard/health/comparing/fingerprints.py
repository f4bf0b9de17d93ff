"""Two fingerprints of what should be one model: the first place that differs, and what in their facts explains it.

An explanation is tried on the sketches: a factor on the logits must give B's statistics, an order of heads B's vectors.
Tensors inside a layer count only where the layer's output differs, so that heads in another order with weights that
know it, or q and k in another basis, are no difference.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from regard.health.comparing.causes.of_fingerprints import explain
from regard.health.comparing.difference import change
from regard.health.comparing.fingerprint import Fingerprint, is_given
from regard.health.comparing.record import CALL_PARTS
from regard.health.comparing.result import LayerDifference, ModelComparison
from regard.health.comparing.sketches import budget_of, centred, pair_of, split

APART = "each model run by itself"
PLACES = {"input": "the input", "output": "the output", "scores": "the scores", "mask": "the mask"}
PLACES |= {"q": "queries", "k": "keys", "v": "values", "attention": "attention's output"}


def compare_fingerprints(a: Fingerprint, b: Fingerprint, tolerance: float | None = None) -> ModelComparison:
    """Find the first place at which two fingerprints differ by more than rounding, and its cause."""
    _check_tokens(a, b)
    if len(a.layers) != len(b.layers) and a.layers and b.layers:
        counts = f"A has {len(a.layers)} layers, B {len(b.layers)}"
        cause = f"the models have {len(a.layers)} and {len(b.layers)} layers: {counts}."
        return ModelComparison(False, None, cause, True, "the number of layers", [], math.nan, 0.0)
    random = [one.facts.get("random", "") for one in (a, b)]
    if any(random):
        name = "AB"[0 if random[0] else 1]
        cause = f"{name} gives another output on each run of one batch: dropout is left on, or other random numbers."
        where = f"the output of {random[0] or random[1]}"
        return ModelComparison(False, None, cause, True, where, [], math.nan, 0.0)
    names = [name for name in a.tensors if name in b.tensors and not is_given(name)]
    names = [name for name in names if name != "logits.ids" and ".sample." not in name]
    changes = {name: _change(a, b, name) for name in names}
    if not changes:
        raise ValueError("the fingerprints have no tensor in common: there is nothing to compare")
    budgets = {name: budget_of(a, b, name) if tolerance is None else tolerance for name in names}
    wrong = {name for name, x in changes.items() if not x <= budgets[name]}
    layers = [_row(a, b, at, changes, wrong) for at in range(max(len(a.layers), len(b.layers), _count(names)))]
    end = "final" if "final" in changes else "logits.values"
    output, rounding = changes.get(end, math.nan), budgets.get(end, 0.0)
    notes = _notes(a, b)
    place = _first(a, wrong, changes)
    if place is None:
        said = "Both compute the same on the tokens that are kept, within rounding."
        return ModelComparison(True, None, said, True, "", layers, output, rounding, notes=notes, given=APART)
    at, part = split(place)
    found, tried = explain(a, b, place, changes, wrong)
    inner = _next_inner(a, place, wrong) if found is None and part.startswith("at.") else None
    if inner is not None:
        found, more = explain(a, b, inner, changes, wrong)
        tried = [*tried, *more]
    first = next((one for one in layers if one.index == at), None)
    where = _say_place(a, place, at, part)
    cause = f"It differs by {changes[place]:.2g} of its size. Tried: {', '.join(tried) or 'nothing'}."
    cause, named = (cause, False) if found is None else (found.text, found.reproduces)
    parts = [] if first is None else [one for one in first.differs if one != "block"] or list(first.differs)
    return ModelComparison(
        False, first, cause, named, where, layers, output, rounding, parts, tried, notes, APART,
        is_seen=found is not None,
    )  # fmt: skip


def _check_tokens(a: Fingerprint, b: Fingerprint) -> None:
    kinds = [{n: x for n, x in one.tensors.items() if n.startswith(("ids.", "decoder."))} for one in (a, b)]
    if kinds[0] and kinds[1]:
        if kinds[0].keys() != kinds[1].keys() or not all(np.array_equal(x, kinds[1][n]) for n, x in kinds[0].items()):
            raise ValueError("the fingerprints are of other token ids; take both on the same batches")
    else:
        digests = [[one.get("inputs") for one in x.facts["tokens"]] for x in (a, b)]
        if digests[0] != digests[1] and all(all(one) for one in digests):
            raise ValueError("the fingerprints are of other inputs; take both on the same batches")
    rows = [[one["rows"] for one in x.facts["tokens"]] for x in (a, b)]
    for one, other in zip(*rows, strict=False):
        if one[: len(other)] != other[: len(one)]:
            raise ValueError("the fingerprints keep other tokens: their masks or their lengths differ")


def _change(a: Fingerprint, b: Fingerprint, name: str) -> float:
    pair = pair_of(a, b, name)
    if pair is None:
        return math.inf
    part = name.rpartition(".")[2]
    if part == "mask":
        return 0.0 if torch.equal(*pair) else math.inf
    if part == "scores":
        pair = centred(pair[0]), centred(pair[1])
        size = max(float(pair[0].square().mean().sqrt()), 1.0)
        return float((pair[0] - pair[1]).abs().max()) / size
    x, y = (one.flatten(2) if one.ndim > 2 else one for one in pair)
    return change(x, y)


def _count(names: list[str]) -> int:
    return 1 + max((split(name)[0] or 0 for name in names if name.startswith("layers.")), default=-1)


def _order(a: Fingerprint, name: str) -> tuple[int, int, int]:
    """Where a place comes: the layer, its part by the order of modules, and of an attention by that of its parts."""
    at, part = split(name)
    if at is None:
        return (-1, 0, 0) if name == "embedding" else (10**9, 0, 0 if name == "final" else 1)
    modules = a.layers[at].get("modules", []) if at < len(a.layers) else []
    middle = modules.index("@attention") if "@attention" in modules else len(modules)
    if part in ("input", "output"):
        return at, -1 if part == "input" else 10**6, 0
    if part.startswith("at."):
        module = part.removeprefix("at.")
        return at, modules.index(module) if module in modules else middle, 0
    cross = 10**5 if part.startswith("cross.") else 0
    part = part.removeprefix("cross.")
    return at, middle + cross, 1 + (CALL_PARTS.index(part) if part in CALL_PARTS else len(CALL_PARTS))


def _first(a: Fingerprint, wrong: set[str], changes: dict[str, float]) -> str | None:
    """The first place that differs and has an effect: inside a layer only where the layer's output differs."""
    ordered = sorted(wrong, key=lambda name: _order(a, name))
    for name in ordered:
        at, part = split(name)
        if at is None or part in ("input", "output"):
            return name
        after = [one for one in (f"layers.{at}.output", f"layers.{at + 1}.input") if one in changes]
        if after and not any(one in wrong for one in after):
            continue
        before = part.startswith("at.") and _order(a, name) < _order(a, f"layers.{at}.q")
        inner = [one for one in wrong if split(one)[0] == at and not split(one)[1].startswith("at.")]
        effective = [one for one in inner if split(one)[1] != "output" and not _attends_alike(one, wrong, changes)]
        if before and f"layers.{at}.attention" in changes and not effective:
            continue  # another basis of q and k, or heads in another order
        if not part.startswith("at.") and name not in effective:
            continue
        return name
    return None


def _next_inner(a: Fingerprint, place: str, wrong: set[str]) -> str | None:
    """The q, k or v that a module before the attention leads to, where one differs."""
    at = split(place)[0]
    names = [f"layers.{at}.{part}" for part in ("q", "k", "v") if f"layers.{at}.{part}" in wrong]
    return names[0] if names and _order(a, place) < _order(a, names[0]) else None


def _attends_alike(name: str, wrong: set[str], changes: dict[str, float]) -> bool:
    """Does a call differ in a way that its logits, or its output, do not show?"""
    prefix, _, part = name.rpartition(".")
    if part in ("q", "k") and f"{prefix}.scores" in changes and f"{prefix}.mask" in changes:
        return not {f"{prefix}.scores", f"{prefix}.mask"} & wrong
    if part == "attention":
        return False
    return f"{prefix}.attention" in changes and f"{prefix}.attention" not in wrong


def _row(a: Fingerprint, b: Fingerprint, at: int, changes: dict[str, float], wrong: set[str]) -> LayerDifference:
    columns = dict(q="q", k="k", v="v", scores="scores", output="attention", block="output")
    numbers = {column: changes.get(f"layers.{at}.{part}") for column, part in columns.items()}
    if f"layers.{at}.mask" in wrong:
        numbers["scores"] = math.inf
    differs = [column for column, part in columns.items() if f"layers.{at}.{part}" in wrong]
    if f"layers.{at}.mask" in wrong and "scores" not in differs:
        differs.append("scores")
    names = [one.layers[at]["name"] if at < len(one.layers) else f"layers.{at}" for one in (a, b)]
    return LayerDifference(at, names[0], names[1], differs=tuple(differs), **numbers)


def _say_place(a: Fingerprint, name: str, at: int | None, part: str) -> str:
    if at is None:
        return {"final": "the model's output", "logits.values": "the logits"}.get(name, name)
    module = a.layers[at]["name"] if at < len(a.layers) else f"layers.{at}"
    if part.startswith("at."):
        return f"the output of {part.removeprefix('at.')}"
    of_cross = " of its cross-attention" if part.startswith("cross.") else ""
    return f"{module}, {PLACES.get(part.removeprefix('cross.'), part)}{of_cross}"


def _notes(a: Fingerprint, b: Fingerprint) -> list[str]:
    notes = []
    for name in ("dtype", "kernel", "model"):
        x, y = a.facts.get(name), b.facts.get(name)
        if x != y:
            notes.append(f"{name}: {x} in A, {y} in B.")
    for name in sorted(set(a.facts.get("config", {})) & set(b.facts.get("config", {}))):
        x, y = a.facts["config"][name], b.facts["config"][name]
        if x != y:
            notes.append(f"The configurations differ in {name}: {x} in A, {y} in B.")
    return notes
