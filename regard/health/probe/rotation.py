"""Recovers rotary positions from q or k of one repeated token: z_t = z_0·e^(jθt) in every pair of numbers.

>>> from regard.health.probe.rotation import recover_rotation, rotate
>>> x = torch.randn(2, 1, 8).expand(2, 16, 8)
>>> angles = 10000.0 ** -(torch.arange(4) / 4)
>>> found = recover_rotation(rotate(x, angles, "halves"))
>>> found.pairing, found.first, bool((found.angles - angles).abs().max() < 1e-4)
('halves', 0, True)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALVES, INTERLEAVED = "halves", "interleaved"
CONSTANT = 2e-3  # relative change of a pair's length, up to which it is a rotation
MOVED = 2e-5  # relative change over the positions, from which on a number depends on them
STILL = 1e-8  # rad per position: a pair that does not turn
STEPS = 6  # of Newton's method
SPREAD = 2e-3  # rad per position by which heads or positions may disagree about an angle


@dataclass(frozen=True)
class Rotation:
    """Angles [pairs] in rad per position of the numbers first … first + 2·pairs − 1 of every head."""

    pairing: str  # "halves" or "interleaved"
    first: int
    angles: Tensor  # float64

    @property
    def width(self) -> int:
        return 2 * len(self.angles)


def pair_indices(first: int, width: int, pairing: str) -> tuple[Tensor, Tensor]:
    """The places of the first and of the second number of each pair."""
    if pairing == HALVES:
        low = torch.arange(first, first + width // 2)
        return low, low + width // 2
    low = torch.arange(first, first + width, 2)
    return low, low + 1


def rotate(x: Tensor, angles: Tensor, pairing: str, first: int = 0, step: float = 1.0) -> Tensor:
    """Returns x [H, N, D] with pair i of position t turned by step·t·angles[i]."""
    low, high = pair_indices(first, 2 * len(angles), pairing)
    turn = step * torch.arange(x.shape[1], dtype=torch.float64)[:, None] * angles.double()
    cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    a, b = x[..., low], x[..., high]
    out = x.clone()
    out[..., low], out[..., high] = a * cos - b * sin, a * sin + b * cos
    return out


def depends_on_position(x: Tensor) -> bool:
    """True if x [H, N, D] of one repeated token is not the same at every position."""
    x = x.double()
    return bool((x - x[:, :1]).abs().amax() > MOVED * x.abs().amax().clamp_min(1e-30))


def recover_rotation(x: Tensor) -> Rotation | None:
    """The rotation by which x [H, N, D] of one repeated token depends on the position; None if it is none.

    The narrowest run of numbers that explains every change wins; pairs whose angle is too small to be seen count as
    part of it if the run is all of D.
    """
    x = x.double().cpu()
    size = x.abs().amax().clamp_min(1e-30)
    moved = ((x - x[:, :1]).abs().amax((0, 1)) > MOVED * size).nonzero().flatten()
    if not len(moved) or x.shape[1] < 8:
        return None
    start, end, whole = int(moved[0]), int(moved[-1]) + 1, x.shape[-1]
    fits = []
    for pairing in (HALVES, INTERLEAVED):
        for first, last in candidate_runs(start, end, whole, pairing):
            angles = angles_of(x, first, last - first, pairing)
            if angles is not None:
                fits.append(Rotation(pairing, first, angles))
    best = min(fits, key=lambda one: (one.width != whole, one.width), default=None)
    return None if best is None else without_still_pairs(best)


def without_still_pairs(found: Rotation) -> Rotation:
    """The rotation without pairs at its ends that do not turn; only neighbours can be left out, not halves."""
    turning = (found.angles.abs() > STILL).nonzero().flatten()
    if found.pairing == HALVES or not len(turning):
        return found
    start, end = int(turning[0]), int(turning[-1]) + 1
    return Rotation(found.pairing, found.first + 2 * start, found.angles[start:end])


def candidate_runs(start: int, end: int, whole: int, pairing: str) -> list[tuple[int, int]]:
    """Runs [first, last) of numbers that may be rotated, if those of [start, end) are seen to move."""
    runs = [(0, whole)] if whole % 2 == 0 else []
    firsts = {0, start - start % 2, start} if pairing == INTERLEAVED else {0, start}
    for first in sorted(firsts):
        for last in range(end, whole + 1):
            if (last - first) % 2 == 0 and (first, last) not in runs:
                runs.append((first, last))
    return runs


def angles_of(x: Tensor, first: int, width: int, pairing: str) -> Tensor | None:
    """The angle per position of each pair [width / 2]; None where the pairs do not turn evenly."""
    low, high = pair_indices(first, width, pairing)
    z = torch.complex(x[..., low], x[..., high])  # [H, N, P]
    length = z.abs()
    rms = length.square().mean().sqrt().clamp_min(1e-30)
    if bool(((length - length[:, :1]).abs() > CONSTANT * torch.maximum(length[:, :1], 0.1 * rms)).any()):
        return None
    step = (z[:, 1:] * z[:, :-1].conj()).sum((0, 1))  # [P]: all heads and positions together
    weight = (length[:, 1:] * length[:, :-1]).sum((0, 1)).clamp_min(1e-30)
    if bool((step.abs() / weight < 1.0 - SPREAD).any()):
        return None
    angles = step.angle()
    positions = torch.arange(z.shape[1], dtype=torch.float64)
    for span in (4, 16, z.shape[1] - 1):  # longer and longer spans, so that small angles stand out of rounding
        span = min(span, z.shape[1] - 1)
        far = (z[:, span:] * z[:, : z.shape[1] - span].conj()).sum((0, 1)) * torch.polar(
            torch.ones_like(angles), -span * angles
        )
        angles = angles + far.angle() / span
    turned = z * torch.polar(torch.ones(len(positions), 1, dtype=torch.float64), -positions[:, None] * angles)
    off = (turned - z[:, :1]).abs() / rms
    return angles if bool(off.amax() < 0.02) else None


def recover_mixed(x: Tensor) -> tuple[str, Tensor, Tensor] | None:
    """(pairing, angles of the first numbers of the pairs, of the second) of x [H, N, D], which is no rotation.

    x_t = x_0·cos(tθ) + (its partner)·sin(tθ) with θ laid out for another pairing: the two of a pair turn differently.
    """
    x = x.double().cpu()
    if x.shape[-1] % 2 or x.shape[1] < 8:
        return None
    for pairing in (HALVES, INTERLEAVED):
        low, high = pair_indices(0, x.shape[-1], pairing)
        a, b = x[:, :1, low], x[:, :1, high]
        first, second = fit_angles(x[..., low], a, -b), fit_angles(x[..., high], b, a)
        if first is not None and second is not None and bool(((first - second).abs() > SPREAD).any()):
            return pairing, first, second
    return None


def fit_angles(y: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """The angles [P] with y_t = a·cos(tθ) + b·sin(tθ), for y [H, N, P]; None if some number has none.

    2·cos θ = (y_{t+1} + y_{t−1}) / y_t gives a start, of either sign, for steps of Newton's method.
    """
    t = torch.arange(y.shape[1], dtype=torch.float64)[:, None]
    middle = y[:, 1:-1]
    cosine = (middle * (y[:, 2:] + y[:, :-2])).sum((0, 1)) / (2 * middle.square().sum((0, 1)).clamp_min(1e-30))
    found, least = torch.zeros_like(cosine), torch.full_like(cosine, torch.inf)
    for angle in (cosine.clamp(-1, 1).arccos(), -cosine.clamp(-1, 1).arccos()):
        for _ in range(STEPS):
            cos, sin = (t * angle).cos(), (t * angle).sin()
            slope = t * (b * cos - a * sin)
            angle = angle + ((y - a * cos - b * sin) * slope).sum((0, 1)) / slope.square().sum((0, 1)).clamp_min(1e-30)
        off = (y - a * (t * angle).cos() - b * (t * angle).sin()).abs().amax((0, 1))
        found, least = torch.where(off < least, angle, found), torch.minimum(off, least)
    return found if bool((least < 0.02 * y.square().mean().sqrt()).all()) else None


def fit_base(angles: Tensor) -> tuple[float, float] | None:
    """(base, factor) with angles ≈ base^(−i/pairs)/factor; None if they do not follow such a law.

    >>> from regard.health.probe.rotation import fit_base
    >>> base, factor = fit_base(0.5 * 500.0 ** -(torch.arange(8) / 8))
    >>> round(base), round(factor, 3)
    (500, 2.0)
    """
    pairs = len(angles)
    size = angles.abs().double()
    seen = size > 1e-4
    if int(seen.sum()) < 2:
        return None
    i = torch.arange(pairs, dtype=torch.float64)[seen] / pairs
    y = size[seen].log()
    slope = float(((i - i.mean()) * (y - y.mean())).sum() / (i - i.mean()).square().sum())
    start = float(y.mean() - slope * i.mean())
    if float((y - start - slope * i).abs().max()) > 0.02:
        return None
    return float(torch.tensor(-slope).exp()), float(torch.tensor(-start).exp())
