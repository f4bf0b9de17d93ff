"""A tensor's numbers in other places: as view and permute move them, or tokens or features in any other order.

A permutation of n numbers is a view and a permutation of axes if place i = Σ digitₖ(i)·strideₖ for digits of some
extents. The extents and strides are read off, so that no reshape has to be guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.health.comparing.causes.trial import Trial

LARGEST = 2**20  # numbers of a tensor whose places are found
CLOSE = 1e-6  # of the numbers' size: two nearer ones are not told apart
DISTINCT = 0.5  # of the numbers, at least, so that places can be told
MOST_TOKENS = 4096
WINDOWS = "the tokens are cut into windows or patches in another way"


@dataclass(frozen=True)
class View:
    """x.flatten().view(shape).permute(order).flatten(), with the axes in `turned` read backwards."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    turned: tuple[int, ...] = ()

    def apply(self, x: Tensor) -> Tensor:
        """The numbers of x in the places that this view gives them, flat."""
        return x.reshape(self.shape).flip(self.turned).permute(self.order).flatten()

    def __str__(self) -> str:
        turned = f", with axes {', '.join(map(str, self.turned))} reversed" if self.turned else ""
        return f"view{self.shape} and permute{self.order}{turned}"


def find_view(places: Tensor) -> View | None:
    """The view whose numbers come from these places of a flat tensor, −1 where one is not known; None without one.

    >>> from regard.health.comparing.causes.orders import find_view
    >>> str(find_view(torch.arange(12).view(3, 4).T.flatten()))
    'view(3, 4) and permute(1, 0)'
    """
    digits: list[tuple[int, int]] = []  # (extent, stride), the innermost first
    while len(places) > 1:
        found = next((one for n in _divisors(len(places)) if (one := _read_digit(places, n)) is not None), None)
        if found is None:
            return None
        extent, stride, places = found
        digits.append((extent, stride))
    by_stride = sorted(range(len(digits)), key=lambda at: -abs(digits[at][1]))
    shape = tuple(digits[at][0] for at in by_stride)
    order = tuple(by_stride.index(at) for at in reversed(range(len(digits))))
    turned = tuple(axis for axis, at in enumerate(by_stride) if digits[at][1] < 0)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if strides != [abs(digits[at][1]) for at in by_stride]:
        return None
    return View(shape, order, turned)


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 1, -1) if n % d == 0]


def _read_digit(places: Tensor, extent: int) -> tuple[int, int, Tensor] | None:
    """(extent, stride, the places of the digit's zeros) if the innermost digit has this extent."""
    rows = places.view(-1, extent)
    known = rows >= 0
    steps = rows.diff(dim=1)[known[:, 1:] & known[:, :-1]]
    if not len(steps) or not bool((steps == steps[0]).all()):
        return None
    stride = int(steps[0])
    starts = (rows - stride * torch.arange(extent)).masked_fill(~known, -1)
    first = known.int().argmax(1, keepdim=True)
    start = starts.gather(1, first)
    if not bool(((starts == start) | ~known).all()):
        return None
    return extent, stride, start[:, 0]


def match_numbers(a: Tensor, b: Tensor) -> Tensor | None:
    """The places in `a` of the numbers of `b`, both flat, −1 where a neighbour is as near; None if they are others."""
    by_a, by_b = a.argsort(), b.argsort()
    sizes = a[by_a], b[by_b]
    near = CLOSE * float(a.norm()) / max(len(a), 1) ** 0.5
    if not float((sizes[0] - sizes[1]).abs().max()) <= near:
        return None
    apart = torch.nn.functional.pad(sizes[0].diff() > 4 * near, (1, 1), value=True)
    places = torch.full_like(by_a, -1)
    places[by_b] = torch.where(apart[1:] & apart[:-1], by_a, -1)
    return places if float((places >= 0).double().mean()) > DISTINCT else None


def explain_orders(trial: Trial) -> None:
    """Try A's numbers in other places: reshaped, shifted, tokens or features in another order."""
    a, b = trial.a.double(), trial.b.double()
    if a.ndim >= 2 and a.shape[-2] > 2:
        for by in (1, -1, 2, -2):
            keep = slice(by, None) if by > 0 else slice(None, by)
            candidate = b.clone()
            candidate[..., keep, :] = a.roll(by, -2)[..., keep, :]
            said = f"B's tokens are A's {abs(by)} place{'s' * (abs(by) > 1)} {'later' if by > 0 else 'earlier'}."
            trial.explains("shifted tokens", candidate, said)
        _try_tokens(trial, a, b)
    width = a.shape[-1]
    if 1 < width <= 4096 and not trial.found:
        flat_a, flat_b = a.reshape(-1, width).T, b.reshape(-1, width).T
        order = torch.cdist(flat_b, flat_a).argmin(1)
        if len(set(order.tolist())) == width:
            said = f"B's features are A's in another order{say_order(order)}."
            trial.explains("features in another order", a[..., order], said)
    if not trial.found and a.numel() <= LARGEST:
        _try_views(trial, a, b)


def _try_views(trial: Trial, a: Tensor, b: Tensor) -> None:
    """B as A viewed and permuted, each sequence alike or all of them together."""
    trial.tried.append("numbers in other places")
    for inner in (slice(1, None), slice(None)) if a.ndim > 2 else (slice(None),):
        shape = a.shape[inner]
        count = math.prod(shape)
        rows = a.reshape(-1, count), b.reshape(-1, count)
        places = match_numbers(rows[0][0], rows[1][0])
        view = None if places is None else find_view(places)
        if view is not None:
            moved = torch.stack([view.apply(row) for row in rows[0]]).reshape(b.shape)
            if trial.explains("numbers in other places", moved, f"{_say_view(view, shape, trial.units)}."):
                return


def _say_view(view: View, shape: tuple[int, ...], units: str) -> str:
    """What a view of [tokens, features] mixes: the axes that stay where they are, before and behind, say it."""
    fixed = [at == axis for at, axis in enumerate(view.order)]
    behind = math.prod(view.shape[len(fixed) - _count_true(fixed[::-1]) :])
    before = math.prod(view.shape[: _count_true(fixed)])
    said = f"B holds A's numbers {list(shape)} in other places, as {view} give them"
    if behind % shape[-1] == 0:
        windows = view.order == (0, 2, 1, 3)
        return f"{said}: {WINDOWS if windows else 'the tokens are in another order'}"
    if len(shape) > 1 and before % shape[-2] == 0:
        return f"{said}: the features of each token are in another order"
    if view.order == (1, 0, 2):
        return f"{said}: {units} and tokens are mixed, as by a view without its transpose(1, 2)"
    return f"{said}: a reshape that mixes tokens and features, as where {units} are cut by view alone"


def _count_true(flags: list[bool]) -> int:
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def _try_tokens(trial: Trial, a: Tensor, b: Tensor) -> None:
    """Each token of B as one of A's tokens, the same in every sequence, or of all sequences together."""
    n = a.shape[-2]
    if n <= MOST_TOKENS:
        own, other = (x.transpose(0, -2).reshape(n, -1) for x in (a, b))
        order = torch.cdist(other, own).argmin(1)
        said = f"B's tokens are A's in another order{say_order(order, tokens=True)}."
        if torch.equal(order, torch.arange(n).flip(0)):
            said = "B's tokens are A's in reverse order."
        elif torch.allclose(other, other.flip(0), atol=1e-6):
            said = "B's tokens are the same from both ends: distances before and behind a token are not told apart."
        elif len(order.unique()) == 1:
            said = f"every token of B is A's token {int(order[0])}: one position for all."
        trial.explains("tokens in another order", a.index_select(-2, order), said)
    count = a.numel() // a.shape[-1]
    if not trial.found and a.ndim == 3 and n < count <= MOST_TOKENS:
        own, other = (x.flatten(0, 1) for x in (a, b))
        order = torch.cdist(other, own).argmin(1)
        if len(order.unique()) == count:
            said = f"B's tokens are A's of all {len(a)} sequences in another order{_say_shift(order, *a.shape[:2])}."
            trial.explains("tokens of all sequences in another order", own[order], said)


def _say_shift(order: Tensor, count: int, width: int) -> str:
    """By how much an image is rolled whose tokens stand in windows, [windows, tokens]; or `say_order`."""
    side, grid = math.isqrt(width), math.isqrt(count)
    for windows in range(1, grid + 1) if side * side == width else ():
        if count % (windows * windows) == 0:
            images = count // windows**2
            size = windows * side
            at = torch.arange(len(order)).view(images, windows, windows, side, side).transpose(2, 3).flatten()
            rolled = at.argsort()[order[at]].view(images, size, size)  # by rows of the image
            down, right = divmod(int(rolled[0, 0, 0]), size)
            by = torch.arange(len(order)).view(images, size, size).roll((-down, -right), (1, 2))
            if torch.equal(rolled, by):
                shifts = [n - size * (2 * n > size) for n in (down, right)]
                return f": the image is shifted by {shifts[0]} rows and {shifts[1]} columns more"
    return say_order(order, tokens=True)


def say_order(order: Tensor, tokens: bool = False) -> str:
    """What an order of rows, features or tokens is known as, of all or within each head.

    >>> from regard.health.comparing.causes.orders import say_order
    >>> say_order(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]))
    ': halves and interleaved pairs are exchanged'
    """
    count, at = len(order), torch.arange(len(order))
    if torch.equal(order, at):
        return ""
    view = find_view(order) if len(set(order.tolist())) == count else None
    if view is not None and not view.turned:
        inner = view.shape[-2:] if view.order[-2:] == (len(view.shape) - 1, len(view.shape) - 2) else ()
        if not tokens and len(view.order) in (2, 3) and 2 in inner:
            return ": halves and interleaved pairs are exchanged"
        known = {(1, 0): ", as height and width", (0, 2, 1, 3): ", as windows or patches are cut"}
        return f": {view} of [{count}]{known.get(view.order, '')}"
    for by in (1, -1):
        if torch.equal(order, at.roll(by)):
            first = "the last is the first" if by > 0 else "the first is the last"
            return f": {first}"
    for by in (2, 3, 4):
        if count % by == 0 and any(torch.equal(order, at.roll(n * count // by)) for n in range(1, by)):
            return f": parts of a stacked matrix are exchanged ({by} parts)"
    moved = int((order != at).nonzero()[0])
    return f" (from {moved} on: {', '.join(map(str, order[moved : moved + 6].tolist()))}, …)"
