"""How far two tensors are apart, row by row, and how far rounding alone can bring them apart."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from regard.health.comparing.record import Key, Run
from regard.health.comparing.scores import Kept, spread

SAFETY = 4.0  # a difference is real beyond so many times what random rounding did
CENTRED = ("softmax",)  # normalisers that a constant added to a row leaves alone
Real = Tensor | None


def rounding_of(*runs: Run) -> float:
    """The relative size of the noise that plays the rounding of these runs: the coarsest dtype's u, 4 u of float32.

    Each result of a 16-bit model is rounded once, by u at most. A sum of n float32 products that is taken in another
    order moves by about u·√(ln n): less than 4 u for every width in use.
    """
    dtypes = {x.dtype for run in runs for x in run.points.values() if x.is_floating_point()}
    sizes = [torch.finfo(dtype).eps / 2 for dtype in dtypes]
    return max([4.0 * 2.0**-24, *(size for size in sizes if size > 2.0**-20)])


def as_rows(x: Tensor, part: str) -> Tensor:
    """[B, N, …, C] in float64: heads [B, H, N, D] of a call are brought behind the tokens."""
    x = x.double()
    if part in ("q", "k", "v", "attention") and x.ndim == 4:
        x = x.transpose(1, 2).flatten(2)
    return x if x.ndim else x[None]


def align(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both with as many sequences, where one holds a single one for all: positions [1, N] and [B, N]."""
    if a.ndim == b.ndim > 1 and a.shape[1:] == b.shape[1:] and 1 in (len(a), len(b)):
        a, b = torch.broadcast_tensors(a, b)
    return a, b


def change(a: Tensor, b: Tensor, part: str = "", real: Real = None) -> float:
    """The largest ‖a − b‖ of a row over the larger of its ‖a‖ and the typical one; inf for other shapes."""
    if part in ("k", "v") and a.ndim == b.ndim == 4 and a.shape[1] != b.shape[1]:
        heads = max(a.shape[1], b.shape[1])
        if heads % a.shape[1] == 0 and heads % b.shape[1] == 0:
            a, b = spread(a, heads), spread(b, heads)
    a, b = align(as_rows(a, part), as_rows(b, part))
    if a.shape != b.shape:
        if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
            return math.inf
        b = b.reshape(a.shape)
    if real is not None and a.ndim >= 2:
        kept = real if a.shape[:2] == real.shape else None
        if kept is None and a.ndim == 2 and a.shape[0] == real.numel():
            kept = real.flatten()
        if kept is not None:
            a, b = a[kept], b[kept]
    return _largest(a.reshape(-1, a.shape[-1]), b.reshape(-1, a.shape[-1]))


def _largest(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    a, b = a.masked_fill(~finite, 0.0), b.masked_fill(~finite, 0.0)
    sizes = a.norm(dim=-1)
    typical = sizes.square().mean().sqrt()
    return float(((a - b).norm(dim=-1) / sizes.clamp_min(max(float(typical), 1e-30))).max())


def mask_change(a: Kept, b: Kept, real: Real = None) -> float:
    """inf if some query sees a key in one call that it does not see in the other, else 0."""
    if a.shape[2:] != b.shape[2:] or a.shape[0] != b.shape[0]:
        return math.inf
    seen = [one.seen() for one in (a, b)]
    if seen[0].shape[1] != seen[1].shape[1]:
        seen = [x.any(1, keepdim=True) for x in seen]
    differs = seen[0] != seen[1]
    if real is not None and differs.shape[0] == real.shape[0] and differs.shape[2] == real.shape[1]:
        differs = differs & real[:, None, :, None]
    return math.inf if bool(differs.any()) else 0.0


def score_change(a: Kept, b: Kept, real: Real = None) -> float:
    """The largest typical difference of a row's logits over their typical size, 1 at least, where both see the key."""
    if a.shape != b.shape:
        return math.inf
    seen = a.seen() & b.seen()
    scores = [x.scores().masked_fill(~seen, 0.0) for x in (a, b)]
    if all(x.sink is None and x.choice is not None and x.choice.name in CENTRED for x in (a, b)):
        count = seen.sum(-1, keepdim=True).clamp_min(1)
        scores = [(s - s.sum(-1, keepdim=True) / count).masked_fill(~seen, 0.0) for s in scores]
    d = (scores[0] - scores[1]).square().sum(-1) / seen.sum(-1).clamp_min(1)
    if real is not None and d.shape[0] == real.shape[0] and d.shape[2] == real.shape[1]:
        d = d * real[:, None]
    size = (scores[0].square().sum() / seen.sum().clamp_min(1)).sqrt().clamp_min(1.0)
    worst = d.max().sqrt() / size if d.numel() else torch.zeros(())
    return float(worst) if bool(torch.isfinite(worst)) else math.inf


def changes_of(a: Run, b: Run, names: dict[Key, Key] | None = None) -> dict[Key, float]:
    """The difference at every place that both runs have, in a's order; `names` leads from a's places to b's."""
    found: dict[Key, float] = {}
    real = a.real
    for key, x in a.points.items():
        other = key if names is None else names.get(key)
        if other is None or other not in b.points:
            continue
        if key.part == "attention" and key in a.calls and other in b.calls:
            one, two = a.calls[key], b.calls[other]
            if one.is_readable and two.is_readable:
                found[key._replace(part="mask")] = mask_change(one, two, real)
                found[key._replace(part="scores")] = score_change(one, two, real)
        found[key] = change(x, b.points[other], key.part, real)
    return found


def budgets_of(a: Run, noisy: Iterable[Run], size: float) -> dict[Key, float]:
    """At every place of `a`, how far rounding may bring another run from it: SAFETY times what noise did."""
    runs = [changes_of(a, one) for one in noisy]
    return {key: SAFETY * max(size, *(run.get(key, 0.0) for run in runs)) for key in runs[0]}


def beyond(changes: dict[Key, float], budgets: dict[Key, float]) -> list[Key]:
    """The places that differ by more than rounding."""
    return [key for key, number in changes.items() if not number <= budgets.get(key, 0.0)]


def first_change(a: Run, b: Run) -> Key | None:
    """The first output, or else the first place, that two runs do not have alike to the bit."""
    found = beyond(changes_of(a, b), {})
    ends = [key for key in found if key.part.startswith("out") or key.part == "attention"]
    return next(iter(ends or found), None)
