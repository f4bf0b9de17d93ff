"""Why two fingerprints differ at one place: explanations that are tried on their sketches and facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import normalizers
from regard.health.comparing.causes.generic import explain_generally
from regard.health.comparing.causes.guesses import GROUPS, Pair, guess_outputs, match_heads
from regard.health.comparing.causes.rotary import Rotary, explain_rotation
from regard.health.comparing.causes.trial import Cause, Trial, name_factor
from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.result import list_layers
from regard.health.comparing.scores import Kept
from regard.health.comparing.sketches import HEAD, HIDDEN, budget_of, centred, pair_of, split

ORDERED = "weights sharded, stacked or repeated otherwise"
FACTS = ("scale", "softcap", "sink", "normalizer", "bias", "temperature", "mask", "heads", "groups", "width", "kind")


def explain(
    a: Fingerprint, b: Fingerprint, place: str, changes: dict[str, float], wrong: set[str]
) -> tuple[Cause | None, list[str]]:
    """(the cause or None, what was tried) of the first difference: what takes A to B, or else B to A."""
    cause, tried = _explain_from(a, b, place, changes, wrong)
    if cause is None or cause.is_vague:
        other, more = _explain_from(b, a, place, changes, wrong)
        tried = list(dict.fromkeys([*tried, *more]))
        if other is not None and (cause is None or not other.is_vague):
            cause = other.mirrored()
    return cause, tried


def _explain_from(
    a: Fingerprint, b: Fingerprint, place: str, changes: dict[str, float], wrong: set[str]
) -> tuple[Cause | None, list[str]]:
    at, part = split(place)
    part = part.removeprefix("cross.")
    prefix = place.removesuffix(part)
    pair = pair_of(a, b, place)
    facts = {name: (layers, x, y) for name, layers, x, y in facts_that_differ(a, b) if at in layers}
    if part == "mask":
        texts = facts.get("mask")
        said = "" if texts is None else f": A's queries see {texts[1]}, B's {texts[2]}"
        return Cause(f"{_lead(a, texts)}the masks differ{said or _say_seen(pair)}.", reproduces=False), ["masks"]
    if pair is None:
        shapes = [list(one.tensors[place].shape[1:]) for one in (a, b)]
        return Cause(f"the shapes differ: {shapes[0]} in A, {shapes[1]} in B.", reproduces=False), ["shapes"]
    budget = budget_of(a, b, place)
    if part == "scores":
        found, done = _explain_scores(a, b, pair, facts, budget)
        output = pair_of(a, b, f"{prefix}attention") if f"{prefix}attention" in changes else None
        if found is not None or output is None or at is None:
            return found, done
        found, more = _explain_output(a, b, at, output, facts, budget_of(a, b, f"{prefix}attention"))
        return found, [*done, *more]
    tried: list[str] = []
    if part in ("q", "k", "v"):
        found, tried = _explain_heads(a, b, place, pair, budget, f"{prefix}v" in wrong)
        if found is not None:
            return found, tried
    if part == "attention" and at is not None:
        found, tried = _explain_output(a, b, at, pair, facts, budget)
        return found, tried
    trial = Trial(_linear(pair[0]), _linear(pair[1]), budget)
    explain_generally(trial, whole=False)
    if at is not None:
        _try_others(trial, a, at, place)
    return trial.best, [*tried, *trial.tried]


def _linear(x: Tensor) -> Tensor:
    """A sketch [1, T, …, C] without the norm behind its products, as [1, T, …]."""
    x = _without_norm(x)
    return x.flatten(2) if x.ndim > 3 else x


def _without_norm(x: Tensor) -> Tensor:
    return x[..., :-1] if x.shape[-1] in (HEAD + 1, HIDDEN + 1, 5) else x


def _try_others(trial: Trial, a: Fingerprint, at: int, place: str) -> None:
    """Does B give what another place of A's layer gives?"""
    for name in sorted(a.tensors):
        if name.startswith(f"layers.{at}.") and ".sample." not in name and name != place:
            x = a.tensors[name]
            if x.dtype.kind == "f" and x.ndim >= 2:
                other = _linear(torch.from_numpy(x.astype(np.float64))[None])
                if other.shape == trial.b.shape:
                    what = split(name)[1].removeprefix("at.")
                    trial.explains("another place's output", other, f"B gives here what A gives in {what}: exchanged.")


def facts_that_differ(a: Fingerprint, b: Fingerprint) -> Iterator[tuple[str, list[int], Any, Any]]:
    """(fact, layers, A's, B's) of the facts that both fingerprints have and that are not the same."""
    for name in FACTS:
        found: dict[tuple, list[int]] = {}
        for at, (one, other) in enumerate(zip(a.layers, b.layers, strict=False)):
            if name in one and name in other and not _alike(one[name], other[name]):
                found.setdefault((one[name], other[name]), []).append(at)
        for (one, other), layers in found.items():
            yield name, layers, one, other


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, (int, float)) and isinstance(y, (int, float)):
        return abs(x - y) <= 1e-5 * max(abs(x), abs(y))
    return x == y


def say_layers(a: Fingerprint, layers: list[int]) -> str:
    """`layer 3`, or `layers 3, 7, full-attention layers only` where the type of the layers says so."""
    types = [one.get("type") for one in a.layers]
    if len(layers) == len(types):
        return "every layer" if len(types) > 1 else "layer 0"
    kinds = {types[at] for at in layers}
    if len(kinds) == 1 and (kind := kinds.pop()) and [at for at, one in enumerate(types) if one == kind] == layers:
        words = kind.replace("_attention", "-attention").replace("_", " ")
        return f"layer {layers[0]}, {words} layers only"
    return list_layers(layers)


def _lead(a: Fingerprint, fact: tuple | None) -> str:
    if fact is None:
        return ""
    said = say_layers(a, fact[0])
    return "" if not said or said == f"layer {fact[0][0]}" else f"{said}: "  # the place names one layer already


def _say_seen(pair: tuple[Tensor, Tensor] | None) -> str:
    if pair is None:
        return ""
    x, y = (one[0] for one in pair)
    at = int((x != y).any(-1).nonzero()[0, 0])
    return (
        f": a query sees keys {int(x[at, 0])} to {int(x[at, 1]) - 1} in A, {int(y[at, 0])} to {int(y[at, 1]) - 1} in B"
    )


def _explain_scores(
    a: Fingerprint, b: Fingerprint, pair: tuple[Tensor, Tensor], facts: dict[str, tuple], budget: float
) -> tuple[Cause | None, list[str]]:
    x, y = (centred(one)[..., :2] for one in pair)  # their logarithms of sums do not scale
    tried = ["logits × a factor"]
    f = float((x * y).sum() / x.square().sum().clamp_min(1e-30))
    size = max(float(y.square().mean().sqrt()), 1.0)
    if float((y - f * x).abs().max()) / size <= max(budget, 1e-4):
        width = next((one.get("width") for one in a.layers if one.get("width")), None)
        known = name_factor(f, width)
        scales = facts.get("scale")
        said = "" if scales is None or scales[1] is None else f" (scale {scales[1]:.4g} in A, {scales[2]:.4g} in B)"
        return Cause(f"{_lead(a, scales)}logits × {f:.4f}{known} in B{said}."), tried
    cap = facts.get("softcap")
    if cap is not None:
        tried.append("soft cap")
        raw = _uncapped(pair[0][..., 0], cap[1])
        capped = raw if cap[2] is None else cap[2] * torch.tanh(raw / cap[2])
        if float((capped - pair[1][..., 0]).abs().max()) / size <= max(budget, 1e-4):
            said = " and ".join(
                f"{'none' if one is None else f'{one:g}'} in {name}" for one, name in zip(cap[1:], "AB", strict=True)
            )
            return Cause(f"{_lead(a, cap)}the soft caps of the logits differ: {said}."), tried
    return None, tried


def _uncapped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.atanh((x / cap).clamp(-1 + 1e-12, 1 - 1e-12))


def _explain_heads(
    a: Fingerprint, b: Fingerprint, place: str, pair: tuple[Tensor, Tensor], budget: float, v_differs: bool
) -> tuple[Cause | None, list[str]]:
    """Heads in another order, or rotary positions: of q, k, v and attention's output, [1, T, H, P]."""
    tried = ["heads in another order"]
    by_head = [x.transpose(1, 2) for x in pair]
    order = match_heads(by_head[0], by_head[1], tolerance=max(budget, 1e-4))
    if order is not None:
        return Cause(f"its heads are A's in the order {order}: {ORDERED}."), tried
    at, part = split(place)
    if part not in ("q", "k") or at is None:
        return None, tried
    tried.append("rotary positions")
    if not all(at < len(one.layers) and "rotary" in one.layers[at] for one in (a, b)):
        return None, ["heads in another order"]  # nobody looked for them
    rotary = [one.layers[at]["rotary"].get(part) for one in (a, b)]
    if v_differs or not any(rotary):
        return None, tried
    if rotary[0] is None or rotary[1] is None:
        return Cause(
            f"{'A' if rotary[0] is None else 'B'} shows no rotary positions, and v agrees.", reproduces=False
        ), tried
    name, sentence = explain_rotation(*(_as_rotary(one) for one in rotary))
    if not name:
        return None, tried
    layers = [n for n, (x, y) in enumerate(zip(a.layers, b.layers, strict=False)) if _differ(x, y, part)]
    return Cause(f"{say_layers(a, layers)}: {sentence}", reproduces=False), tried  # a fact of both files


def _differ(x: dict[str, Any], y: dict[str, Any], part: str) -> bool:
    one, other = (z.get("rotary", {}).get(part) for z in (x, y))
    return one is not None and other is not None and bool(explain_rotation(_as_rotary(one), _as_rotary(other))[0])


def _as_rotary(one: dict[str, Any]) -> Rotary:
    omega = torch.tensor(one["frequencies"], dtype=torch.float64)
    return Rotary(one["pairing"], one["width"], omega, one["offset"], one["factor"])


def _explain_output(
    a: Fingerprint, b: Fingerprint, at: int, pair: tuple[Tensor, Tensor], facts: dict[str, tuple], budget: float
) -> tuple[Cause | None, list[str]]:
    """Attention's output where its q, k, v and scores agree: every other way to compute it, on the heads kept."""
    order = match_heads(pair[0].transpose(1, 2), pair[1].transpose(1, 2), tolerance=max(budget, 1e-4))
    if order is not None:
        return Cause(f"its heads are A's in the order {order}: {ORDERED}."), []
    tried = ["heads in another order"]
    pair = _without_norm(pair[0]), _without_norm(pair[1])
    kept, target = _sampled(a, at, pair[0]), _target(a, at, pair[1])
    if kept is not None and target is not None and (kept.shape[2] > 1 or kept.shape[3] == 1):  # one row fits too much
        layer = a.layers[at]
        guess = Pair(kept, kept.change(output=target, obstacle="a sample"), budget, width=layer.get("width"))
        trial = Trial(kept.output, target, budget, "attention")
        for name, tiled in _tiled(a, at, kept):
            said = f"B pairs heads with {name} in another order: {GROUPS}"
            trial.explains("order of grouped heads", tiled, said)
        for one in guess_outputs(guess):
            trial.explains(*one)
        tried += trial.tried
        if trial.best is not None:
            lead = next((_lead(a, fact) for name, fact in facts.items() if name in ("softcap", "sink", "mask")), "")
            return replace(trial.best, text=lead + trial.best.text), tried
    x, y = pair
    trial = Trial(_linear(x), _linear(y), budget)
    each = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_min(1e-30)
    said = "each head's rows are A's times a number of their own: weights that do not sum to 1."
    if "sink" in facts:
        said = f"{_lead(a, facts['sink'])}only {'A' if facts['sink'][1] else 'B'} has sinks in the denominator."
    trial.explains("a factor per query and head", _linear(each * x), said, "sink" not in facts)
    explain_generally(trial, whole=False)
    return trial.best, [*tried, *trial.tried]


def _target(a: Fingerprint, at: int, x: Tensor) -> Tensor | None:
    """The output sketches [1, H, T, P] of the rows and heads that A sampled."""
    sample = a.layers[at].get("sample") or {}
    rows, heads = sample.get("rows", []), sample.get("heads", [])
    if not rows or max(rows) >= x.shape[1] or max(heads) >= x.shape[2]:
        return None
    return x[:, rows][:, :, heads].transpose(1, 2)


def _sampled(one: Fingerprint, at: int, attention: Tensor) -> Kept | None:
    """The sample of a layer's attention as a call: its logits as q, and the identity as k."""
    names = {name: f"layers.{at}.sample.{name}" for name in ("raw", "seen", "v", "bias", "sink", "temperature")}
    found = {name: torch.from_numpy(one.tensors[x].astype(np.float64)) for name, x in names.items() if x in one.tensors}
    output = _target(one, at, attention)
    if output is None or not {"raw", "seen", "v"} <= set(found) or found["raw"].ndim != 3:
        return None
    found = {name: x.transpose(0, 1)[None] for name, x in found.items()}
    found["v"] = _without_norm(found["v"])
    if found["v"].shape[-1] != output.shape[-1]:
        return None
    facts, keys = one.layers[at], found["raw"].shape[-1]
    try:
        choice = normalizers.get(facts.get("normalizer", "softmax"))
    except ValueError:
        return None
    return Kept(
        found["raw"], torch.eye(keys, dtype=torch.float64).expand(1, found["raw"].shape[1], keys, keys), found["v"],
        output, "sample", 1.0, facts.get("softcap"), found.get("sink"), found.get("temperature"), choice,
        found["seen"] > 0, found.get("bias"), positions=_places_of(one, facts["sample"]["rows"]),
    )  # fmt: skip


def _places_of(one: Fingerprint, chosen: list[int]) -> Tensor:
    """The places in their sequence of chosen tokens of the first batch."""
    rows = one.facts["tokens"][0]["rows"]
    return torch.tensor([int(rows[row][1]) if row < len(rows) else 0 for row in chosen])


def _tiled(a: Fingerprint, at: int, kept: Kept) -> Iterator[tuple[str, Tensor]]:
    """The output with grouped heads repeated as whole groups: values alone, keys and values, keys alone."""
    names = [f"layers.{at}.sample.{name}" for name in ("tiled", "tiled_v")]
    if not all(name in a.tensors for name in names):
        return
    raw, v = (torch.from_numpy(a.tensors[name].astype(np.float64)).transpose(0, 1)[None] for name in names)
    v, other = _without_norm(v), kept.change(q=raw)
    yield "values", kept.weigh() @ v
    yield "keys and values", other.weigh() @ v
    yield "keys", other.weigh() @ kept.values()
