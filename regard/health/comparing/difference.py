"""How far two runs are apart: which place is which, how tensors differ row by row, and what rounding alone does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.health.comparing.record import CALL_PARTS, Key, Run
from regard.health.comparing.scores import Kept, with_equal_heads

SHARED = 0.7  # part of the places that two runs of the same code have in common, at least
SAFETY = 4.0  # a difference is real beyond so many times what random rounding did
CENTRED = ("softmax",)  # normalisers that a constant added to a row leaves alone
Real = Tensor | None


def find_blocks(model: nn.Module, run: Run) -> list[str]:
    """The names of the blocks in order of execution: entries of lists of modules that keep the shape of their input.

    Without such lists: the outermost parts that hold an attention call and keep the shape.
    """
    order = [key.module for key in run.points if key.part == "in" and key.use == 0]
    listed = [name for name in order if name.rpartition(".")[2].isdigit() and _keeps_shape(model, run, name)]
    found = _outermost(listed)
    if found:
        return found
    holding = [name for name in order if name and _keeps_shape(model, run, name)]
    holding = [name for name in holding if sum(is_within(key.module, name) for key in run.calls) in (1, 2)]
    return _outermost(holding)


def _keeps_shape(model: nn.Module, run: Run, name: str) -> bool:
    given, returned = run.points.get(Key("in", name)), run.points.get(Key("out", name))
    if given is None or returned is None or given.shape != returned.shape or not given.is_floating_point():
        return False
    return given.ndim >= 2 and any(True for _ in model.get_submodule(name).children())


def _outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(other != name and is_within(name, other) for other in names)]


def is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.") or not outer


@dataclass(frozen=True)
class Pairing:
    """Which place of A is which of B.

    Attributes:
        places: from A's places to B's.
        same_code: the modules have the same names, so that every place has its counterpart.
        blocks: A's and B's blocks in order.
    """

    places: dict[Key, Key]
    same_code: bool
    blocks: tuple[list[str], list[str]]

    def block_of(self, key: Key) -> int | None:
        """The index of A's block that holds a place; None outside."""
        return next((at for at, name in enumerate(self.blocks[0]) if is_within(key.module, name)), None)

    def counterpart(self, key: Key) -> Key:
        """B's place for A's, the same where B has none; a call's mask and scores are where its output is."""
        at = key if key in self.places or key.part not in CALL_PARTS else key._replace(part="attention")
        return self.places.get(at, at)._replace(part=key.part)

    def mirrored(self) -> Pairing:
        """The same from B's side."""
        return Pairing({other: key for key, other in self.places.items()}, self.same_code, self.blocks[::-1])

    def forced(self, a: Run, everywhere: bool) -> Run:
        """The inputs that B's modules get instead of their own: those of A's blocks, or of every module."""
        inside = set(self.blocks[0])
        points = {
            self.places[key]: x for key, x in a.points.items()
            if key.part == "in" and key in self.places and (everywhere or key.module in inside)
        }  # fmt: skip
        return Run(points)


def pair(a: Run, b: Run, blocks: tuple[list[str], list[str]]) -> Pairing:
    """Pair the places of two runs by name, or else blocks, attention calls and outputs by order."""
    common = a.points.keys() & b.points.keys()
    modules = [{key.module for key in run.points if key.part in ("in", "out")} for run in (a, b)]
    shared = modules[0] & modules[1]
    if len(shared) >= SHARED * max(len(modules[0]), len(modules[1]), 1):
        return Pairing({key: key for key in a.points if key in common}, True, blocks)
    places: dict[Key, Key] = {}
    names = dict(zip(*blocks, strict=False)) | {"": ""}
    for key in a.points:
        if key.part in ("in", "out") and key.module in names:
            places[key] = key._replace(module=names[key.module])
    for one, other in zip(a.calls, b.calls, strict=False):
        places |= {one._replace(part=part): other._replace(part=part) for part in ("q", "k", "v", "attention")}
    places = {key: other for key, other in places.items() if key in a.points and other in b.points}
    return Pairing({key: places[key] for key in a.points if key in places}, False, blocks)


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
    if part in ("k", "v") and a.ndim == b.ndim == 4:
        a, b = with_equal_heads(a, b)
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
