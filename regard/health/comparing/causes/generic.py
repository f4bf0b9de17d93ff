"""Simple ways in which one tensor follows from another: a factor, an offset, an order, a rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from regard.health.comparing.causes.orders import explain_orders
from regard.health.comparing.causes.trial import CAPS, Cause, Trial, fit_factor, name_factor, round_through
from regard.health.comparing.difference import change

SHAPES = frozenset({"shapes"})
ROWS = 4  # rows for each number that is fitted per column, at least


def explain_generally(trial: Trial, numbers: Mapping[str, float] | None = None, whole: bool = True) -> None:
    """Try what may happen to any tensor [..., C], the simplest first; linear things alone where it is a sketch."""
    a, b = trial.a.double(), trial.b.double()
    if a.shape != b.shape:
        return
    if trial.is_lost:
        return
    if not bool(b.any()) and bool(a.any()):
        trial.explains("zeros", b, "it is all zero in B.")
        return
    width = a.shape[-1]
    f = fit_factor(a, b)
    trial.explains("a factor", f * a, f"it is {f:.5g} times A's in B{name_factor(f, width, dict(numbers or {}))}.")
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if whole and trial.a.dtype in (torch.float32, torch.float64):
            trial.explains("rounding", round_through(a, dtype), f"B rounds it to {name}.")
    for cap in (*CAPS, *(x for name, x in (numbers or {}).items() if "softcap" in name)):
        if whole and float(a.abs().max()) < 100.0 * cap:
            said = f"soft cap of {cap:g}, c·tanh(x/c)"
            trial.explains("soft cap", cap * torch.tanh(a / cap), f"B has a {said}, that A has not.")
            if float(a.abs().max()) < cap:
                trial.explains("soft cap", cap * torch.atanh(a / cap), f"B leaves out A's {said}.")
    if trial.found:
        return
    rows = a.reshape(-1, width)
    if len(rows) >= ROWS:
        offset = (b - a).reshape(-1, width).mean(0)
        sign = "leaves out or adds" if float(offset.norm()) > 0 else "changes"
        trial.explains(
            "an offset", a + offset, f"B {sign} the same vector in every token: a bias, or a type embedding.", True
        )
        if whole:
            ratio = (rows * b.reshape(-1, width)).sum(0) / rows.square().sum(0).clamp_min(1e-30)
            trial.explains("a weight per feature", a * ratio, _say_weight(ratio), True)
        size = a.square().sum(-1, keepdim=True).clamp_min(1e-30)
        each = (a * b).sum(-1, keepdim=True) / size
        trial.explains(
            "a factor per row", each * a, "each row is a multiple of A's in B: a norm that is missing or another.", True
        )
        for heads in (n for n in range(2, width // 4 + 1) if width % n == 0 and whole):
            x, y = (one.reshape(-1, heads, width // heads) for one in (a, b))
            each = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_min(1e-30)
            trial.explains("a factor per row of each head", (each * x).reshape(a.shape), (
                "each head's rows are multiples of A's in B: their weights do not sum to 1, or another denominator."
            ), is_vague=True)  # fmt: skip
    if a.ndim >= 3 and a.shape[0] > 1 and trial.part == "":
        shift = (b - a).mean(0, keepdim=True)
        trial.explains("an offset per position", a + shift, (
            "B's tokens differ from A's by a vector per position, the same in every sequence: position embeddings."
        ), is_vague=True)  # fmt: skip
    if whole:
        explain_orders(trial)


def explain_shapes(trial: Trial) -> None:
    """Try how tensors of other shapes hold the same: axes exchanged, or a part of the other."""
    a, b = trial.a.double(), trial.b.double()
    said = f"the shapes differ, {list(a.shape)} in A and {list(b.shape)} in B"
    trial.tried.append("shapes")
    if a.ndim == b.ndim and a.numel() == b.numel() and a.ndim <= 4:
        names = ("the batch", "heads", "tokens", "features") if a.ndim == 4 else ("the batch", "tokens", "features")
        for order in itertools.permutations(range(a.ndim)):
            if a.permute(order).shape == b.shape and change(a.permute(order), b) <= trial.tolerance:
                moved = [names[at] if at < len(names) else str(at) for at, to in enumerate(order) if at != to]
                trial.found.append(Cause(f"{said}: B takes {' and '.join(moved)} for one another.", SHAPES))
                return
    along = [_find_axis(x) for x in (a, b)]
    if None not in along and along[0] != along[1]:
        said = f"{said}: its numbers count along axis {along[0]} in A and along axis {along[1]} in B"
        trial.found.append(Cause(f"{said} (0 is the batch, 1 the tokens).", SHAPES))
        return
    axes = [at for at, (x, y) in enumerate(zip(a.shape, b.shape, strict=False)) if x != y]
    if a.ndim == b.ndim and len(axes) == 1:
        for (one, x), (other, y) in itertools.permutations((("A", a), ("B", b))):
            for start in range(max(y.shape[axes[0]] - x.shape[axes[0]] + 1, 0)):
                if change(x, y.narrow(axes[0], start, x.shape[axes[0]])) <= trial.tolerance:
                    what = f"places {start} to {start + x.shape[axes[0]] - 1} of axis {axes[0]} alone"
                    trial.found.append(Cause(f"{said}: {one} holds {other}'s {what}.", SHAPES, True))
                    return
    trial.found.append(Cause(f"{said}, and neither holds the other's numbers.", SHAPES, True, reproduces=False))


def _find_axis(x: Tensor) -> int | None:
    """The only axis along which a tensor is 0, 1, 2, …; None for any other."""
    long = [axis for axis, n in enumerate(x.shape) if n > 1]
    return long[0] if len(long) == 1 and torch.equal(x.flatten(), torch.arange(x.numel()).to(x)) else None


def explain_numbers(trial: Trial) -> None:
    """Try how whole numbers, positions [B, N] or buckets [N, N], follow from others: an offset, another law."""
    a, b = trial.a.double(), trial.b.double()
    by = b - a
    first = by.flatten()[:1]
    said = f"its numbers are {float(first.abs()):g} {'larger' if float(first) > 0 else 'smaller'} in B than in A"
    trial.explains("an offset", a + first, f"{said}: positions that begin at another place.")
    if a.ndim > 1 and not trial.found:
        each = by[..., -1:]
        said = (
            f"its numbers are moved by {_range(each)} in B, as sequences begin at other places: padding counts or not."
        )
        for name, count in (("an offset per sequence", a + each), ("positions from 0", (a + each).clamp_min(0))):
            trial.explains(name, count, said)
    if a.shape[-2:-1] == a.shape[-1:]:
        trial.explains("transposed", a.transpose(-1, -2), (
            "its rows are A's columns in B: queries and keys are exchanged, and distances have the opposite sign."
        ))  # fmt: skip
    trial.explains("sign", -a, "its numbers have the other sign in B.")
    _try_buckets(trial)
    if not trial.found:
        explain_orders(trial)


def _try_buckets(trial: Trial) -> None:
    """Distances j − i [M, N] in T5's buckets: one for each short distance, then as many by their logarithm."""
    if trial.a.ndim < 2 or trial.a.shape != trial.b.shape or trial.a.shape[-1] < 4:
        return
    found: list[list[tuple]] = [[], []]
    queries, keys = trial.a.shape[-2:]
    last = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    aligned = {"the last query at the last key": last, "the first query at the first key": last + keys - queries}
    sizes = itertools.product((True, False), (4, 8, 16, 32, 64, 128), (8, 16, 20, 32, 64, 128, 256, 512))
    for law, (where, distance) in itertools.product(sizes, list(aligned.items())[: 1 + (keys > queries)]):
        buckets = _bucket(distance, *law).expand(trial.a.shape)
        for one, x in zip(found, (trial.a, trial.b), strict=True):
            if torch.equal(buckets, x.long()):
                one.append((*law, where))
    if found[0] and found[1]:
        a, b = min(itertools.product(*found), key=lambda pair: sum(x != y for x, y in zip(*pair, strict=True)))
        words = [
            ("both directions" if both else "earlier keys alone", f"{count} buckets", f"up to {most}", where)
            for both, count, most, where in (a, b)
        ]
        own, other = (", ".join(said for said in one if said not in other) for one, other in (words, words[::-1]))
        trial.explains("buckets", trial.b, f"relative positions have other buckets: {own} in A, {other} in B.")


def _bucket(distance: Tensor, both: bool, count: int, most: int) -> Tensor:
    count //= 2 if both else 1
    first = (distance > 0) * count * both
    d = distance.abs() if both else (-distance).clamp_min(0)
    exact = count // 2
    far = exact + ((d / exact).clamp_min(1).log() / math.log(max(most / exact, 1.001)) * (count - exact)).long()
    return first + torch.where(d < exact, d, far.clamp_max(count - 1))


def _say_weight(ratio: Tensor) -> str:
    return f"each feature is {_range(ratio)} times A's in B: a norm's weight, with or without 1 added."


def _range(x: Tensor) -> str:
    low, high = f"{float(x.min()):.4g}", f"{float(x.max()):.4g}"
    return low if low == high else f"{low} to {high}"
