"""Simple ways in which one tensor follows from another: a factor, an offset, an order, a rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.health.comparing.causes.trial import Trial, fit_factor, name_factor, round_through

CAPS = (15.0, 20.0, 30.0, 50.0)  # soft caps of logits
ROWS = 4  # rows for each number that is fitted per column, at least


def explain_generally(trial: Trial, numbers: Mapping[str, float] | None = None, whole: bool = True) -> None:
    """Try what may happen to any tensor [..., C], the simplest first; linear things alone where it is a sketch."""
    a, b = trial.a.double(), trial.b.double()
    if a.shape != b.shape:
        return
    finite = torch.isfinite(b)
    if not bool(finite.all()) and bool(torch.isfinite(a).all()):
        trial.tried.append("values that are not finite")
        trial.found.append((f"B has {int((~finite).sum())} values that are not finite, A has none.", 0.0))
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
            "an offset", a + offset, f"B {sign} the same vector in every token: a bias, or a type embedding."
        )
        if whole:
            ratio = (rows * b.reshape(-1, width)).sum(0) / rows.square().sum(0).clamp_min(1e-30)
            trial.explains("a weight per feature", a * ratio, _say_weight(ratio))
        size = a.square().sum(-1, keepdim=True).clamp_min(1e-30)
        each = (a * b).sum(-1, keepdim=True) / size
        trial.explains(
            "a factor per row", each * a, "each row is a multiple of A's in B: a norm that is missing or another."
        )
    if a.ndim >= 3 and a.shape[0] >= 3 and trial.part == "":
        shift = (b - a).mean(0, keepdim=True)
        trial.explains("an offset per position", a + shift, (
            "B's tokens differ from A's by a vector per position, the same in every sequence: position embeddings."
        ))  # fmt: skip
    if whole:
        _try_orders(trial, a, b)


def explain_numbers(trial: Trial) -> None:
    """Try how whole numbers [B, N], positions or ids, follow from others: an offset for all, or one per sequence."""
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
    if not trial.found:
        _try_orders(trial, a, b)


def _say_weight(ratio: Tensor) -> str:
    return f"each feature is {_range(ratio)} times A's in B: a norm's weight, with or without 1 added."


def _range(x: Tensor) -> str:
    low, high = f"{float(x.min()):.4g}", f"{float(x.max()):.4g}"
    return low if low == high else f"{low} to {high}"


def _try_orders(trial: Trial, a: Tensor, b: Tensor) -> None:
    """A's numbers in other places: reversed, rolled, permuted, reshaped."""
    dim = -2
    if a.ndim >= 2 and a.shape[dim] > 2:
        for by in (1, -1):
            rolled = a.roll(by, dim)
            keep = slice(1, None) if by == 1 else slice(None, -1)
            candidate = b.clone()
            candidate[..., keep, :] = rolled[..., keep, :]
            trial.explains(
                "shifted tokens", candidate, f"B's tokens are A's one place {'later' if by == 1 else 'earlier'}."
            )
        trial.explains("reversed tokens", a.flip(dim), "B's tokens are A's in reverse order.")
    width = a.shape[-1]
    if 1 < width <= 4096 and trial.found == []:
        flat_a, flat_b = a.reshape(-1, width).T, b.reshape(-1, width).T
        order = torch.cdist(flat_b, flat_a).argmin(1)
        if len(set(order.tolist())) == width:
            trial.explains(
                "features in another order", a[..., order], f"B's features are A's in another order{say_order(order)}."
            )
    if trial.found == []:
        same = a.flatten().sort().values, b.flatten().sort().values
        trial.tried.append("numbers in other places")
        left = float((same[0] - same[1]).norm() / same[0].norm().clamp_min(1e-30))
        if left <= trial.tolerance and 100.0 * left <= trial.before:
            trial.found.append(("it holds A's numbers in other places: a reshape that mixes heads with time.", 0.0))


def say_order(order: Tensor) -> str:
    """What an order of rows or features is known as, of all or within each head.

    >>> from regard.health.comparing.causes.generic import say_order
    >>> say_order(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]))
    ': halves and interleaved pairs are exchanged'
    """
    count = len(order)
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
                return f": it is read as [{heads}, {d // heads}] in one and as [{d // heads}, {heads}] in the other"
    moved = int((order != torch.arange(count)).nonzero()[0])
    return f" (from {moved} on: {', '.join(map(str, order[moved : moved + 6].tolist()))}, …)"
