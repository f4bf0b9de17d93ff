"""Simple ways in which one tensor follows from another: a factor, an offset, an order, a rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

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
        _try_orders(trial, a, b)


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
    axes = [at for at, (x, y) in enumerate(zip(a.shape, b.shape, strict=False)) if x != y]
    if a.ndim == b.ndim and len(axes) == 1:
        for (one, x), (other, y) in itertools.permutations((("A", a), ("B", b))):
            for start in range(max(y.shape[axes[0]] - x.shape[axes[0]] + 1, 0)):
                if change(x, y.narrow(axes[0], start, x.shape[axes[0]])) <= trial.tolerance:
                    what = f"places {start} to {start + x.shape[axes[0]] - 1} of axis {axes[0]} alone"
                    trial.found.append(Cause(f"{said}: {one} holds {other}'s {what}.", SHAPES, True))
                    return
    trial.found.append(Cause(f"{said}, and neither holds the other's numbers.", SHAPES, True))


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
        _try_orders(trial, a, b)


def _try_buckets(trial: Trial) -> None:
    """Distances j − i [M, N] in T5's buckets: one for each short distance, then as many by their logarithm."""
    if trial.a.ndim < 2 or trial.a.shape != trial.b.shape or trial.a.shape[-2] < 2:
        return
    found: list[list[tuple]] = [[], []]
    queries, keys = trial.a.shape[-2:]
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    for law in itertools.product((True, False), (4, 8, 16, 32, 64, 128), (8, 16, 20, 32, 64, 128, 256, 512)):
        buckets = _bucket(distance, *law).expand(trial.a.shape)
        for one, x in zip(found, (trial.a, trial.b), strict=True):
            if torch.equal(buckets, x.long()):
                one.append(law)
    if found[0] and found[1]:
        a, b = min(itertools.product(*found), key=lambda pair: sum(x != y for x, y in zip(*pair, strict=True)))
        words = [
            ("both directions" if both else "earlier keys alone", f"{count} buckets", f"up to {most}")
            for both, count, most in (a, b)
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


def _try_orders(trial: Trial, a: Tensor, b: Tensor) -> None:
    """A's numbers in other places: reversed, rolled, permuted, reshaped."""
    dim = -2
    if a.ndim >= 2 and a.shape[dim] > 2:
        for by in (1, -1, 2, -2):
            keep = slice(by, None) if by > 0 else slice(None, by)
            candidate = b.clone()
            candidate[..., keep, :] = a.roll(by, dim)[..., keep, :]
            said = f"B's tokens are A's {abs(by)} place{'s' * (abs(by) > 1)} {'later' if by > 0 else 'earlier'}."
            trial.explains("shifted tokens", candidate, said)
        _try_tokens(trial, a, b)
    width = a.shape[-1]
    if 1 < width <= 4096 and trial.found == []:
        flat_a, flat_b = a.reshape(-1, width).T, b.reshape(-1, width).T
        order = torch.cdist(flat_b, flat_a).argmin(1)
        if len(set(order.tolist())) == width:
            trial.explains(
                "features in another order", a[..., order], f"B's features are A's in another order{say_order(order)}."
            )
    if trial.found == [] and len(a.unique()) > 0.5 * a.numel():
        same = a.flatten().sort().values, b.flatten().sort().values
        trial.tried.append("numbers in other places")
        left = float((same[0] - same[1]).norm() / same[0].norm().clamp_min(1e-30))
        if left <= trial.tolerance and 100.0 * left <= trial.before:
            said = "it holds A's numbers in other places: a reshape that mixes heads with time."
            trial.found.append(Cause(said, frozenset({"numbers in other places"}), True))


def _try_tokens(trial: Trial, a: Tensor, b: Tensor) -> None:
    """Each token of B as one of A's tokens, the same in every sequence."""
    n = a.shape[-2]
    if n > 4096:
        return
    own, other = (x.transpose(0, -2).reshape(n, -1) for x in (a, b))
    order = torch.cdist(other, own).argmin(1)
    said = f"B's tokens are A's in another order{say_order(order)}."
    if torch.equal(order, torch.arange(n).flip(0)):
        said = "B's tokens are A's in reverse order."
    elif torch.allclose(other, other.flip(0), atol=1e-6):
        said = "B's tokens are the same from both ends: distances before and behind a token are not told apart."
    elif len(order.unique()) == 1:
        said = f"every token of B is A's token {int(order[0])}: one position for all."
    trial.explains("tokens in another order", a.index_select(-2, order), said)


def say_order(order: Tensor) -> str:
    """What an order of rows or features is known as, of all or within each head.

    >>> from regard.health.comparing.causes.generic import say_order
    >>> say_order(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]))
    ': halves and interleaved pairs are exchanged'
    """
    count = len(order)
    if torch.equal(order, torch.arange(count)):
        return ""
    for d in (d for d in range(4, count + 1) if count % d == 0):
        inner, at = order[:d], torch.arange(d)
        if not torch.equal(order, (torch.arange(0, count, d)[:, None] + inner).flatten()):
            continue
        if d % 2 == 0 and any(
            torch.equal(inner, x) for x in (torch.cat([at[::2], at[1::2]]), at.view(2, -1).T.flatten())
        ):
            return ": halves and interleaved pairs are exchanged"
        for by in (2, 3, 4):
            if d % by == 0 and any(torch.equal(inner, at.roll(n * d // by)) for n in range(1, by)):
                return f": parts of a stacked matrix are exchanged ({by} parts)"
        for heads in range(2, d // 2 + 1):
            if d % heads == 0 and torch.equal(inner, at.view(heads, -1).T.flatten()):
                return f": [{heads}, {d // heads}] is read as [{d // heads}, {heads}], as height and width"
    moved = int((order != torch.arange(count)).nonzero()[0])
    return f" (from {moved} on: {', '.join(map(str, order[moved : moved + 6].tolist()))}, …)"
