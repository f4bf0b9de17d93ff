"""Rotary positions recovered from vectors before and after them, and the ways in which two of them differ.

With z = x₁ + i·x₂ of a pair of dims, rotation is z·m·exp(i·(position·ω + φ)): m is the attention factor, ω the
frequency of the pair, φ = offset·ω. Pairs are (j, j + r/2), "halves", or (2j, 2j + 1), "pairs", of the first r dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.health.comparing.causes.trial import name_factor

FITS = 2e-3  # relative error up to which vectors are a rotation of others, beside their rounding
STYLES = ("halves", "pairs")


@dataclass(frozen=True)
class Rotary:
    """How a tensor [B, H, N, D] is rotated by its positions."""

    style: str
    width: int  # r, the dims that are rotated: the first ones
    omega: Tensor  # [r/2]
    offset: float  # positions of the first token
    factor: float
    positions: Tensor | None = None  # [N], 0, 1, … if None
    error: float = 0.0

    @property
    def base(self) -> float | None:
        """b where ω_j = b^(−2j/r) or a multiple of it; None where the frequencies follow no such law."""
        omega = self.omega.abs()
        if len(omega) < 2 or float(omega.min()) <= 0:
            return None
        x = -2.0 * torch.arange(len(omega)).double() / self.width
        y = omega.double().log()
        weight = (omega > 1e-4).double() + 1e-6
        mean = [(weight * one).sum() / weight.sum() for one in (x, y)]
        spread = (weight * (x - mean[0]).square()).sum().clamp_min(1e-12)
        slope = (weight * (x - mean[0]) * (y - mean[1])).sum() / spread
        left = (weight * (y - mean[1] - slope * (x - mean[0])).abs()).max()
        return float(slope.exp()) if float(left) < 0.02 else None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and words, as a fingerprint keeps them."""
        base = None if self.base is None else float(f"{self.base:.4g}")
        return dict(
            pairing=self.style, width=self.width, base=base, offset=self.offset, factor=float(f"{self.factor:.5g}"),
            frequencies=[float(f"{x:.4g}") for x in self.omega.tolist()],
        )  # fmt: skip


def round_base(base: float) -> str:
    """A base as it is written in a configuration where it is near one."""
    for known in (1e3, 1e4, 1.6e5, 1e5, 2.5e5, 5e5, 1e6, 1e7, 1.5e5, 8e6):
        if abs(base / known - 1) < 0.02:
            return f"{known:g}" if known < 1e6 else f"{known:.3g}"
    return f"{base:.0f}" if 1.0 <= base < 1e5 else f"{base:.4g}"


def split_pairs(x: Tensor, style: str, width: int) -> Tensor:
    """The pairs of the first `width` dims as complex numbers, [..., width/2]."""
    x = x[..., :width].double()
    first, second = (x[..., : width // 2], x[..., width // 2 :]) if style == "halves" else (x[..., ::2], x[..., 1::2])
    return torch.complex(first.contiguous(), second.contiguous())


def join_pairs(z: Tensor, rest: Tensor, style: str) -> Tensor:
    """The inverse of `split_pairs`; `rest` are the dims that are not rotated."""
    parts = (z.real, z.imag)
    rotated = torch.cat(parts, -1) if style == "halves" else torch.stack(parts, -1).flatten(-2)
    return torch.cat([rotated, rest.double()], -1)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, H, N, D], not yet rotated, with these rotary positions."""
    n = x.shape[-2]
    at = torch.arange(n).double() if rotary.positions is None else rotary.positions.double()
    angle = (at + rotary.offset)[:, None] * rotary.omega.double()
    z = split_pairs(x, rotary.style, rotary.width) * torch.polar(torch.full_like(angle, rotary.factor), angle)
    return join_pairs(z, x[..., rotary.width :], rotary.style)


def round_rotations(x: Tensor, rotary: Rotary) -> Iterator[tuple[str, Tensor]]:
    """x rotated with frequencies, angles or their cosines and sines rounded to 16 bits, each with its name."""
    omega = rotary.omega.double()
    if (base := rotary.base) is not None and rotary.omega.abs().max() > 0:  # exact, so that it rounds as the model's
        law = float(round_base(base)) ** (-2.0 * torch.arange(len(omega)).double() / rotary.width) * omega[0].sign()
        omega = law if torch.allclose(law, omega, rtol=1e-3, atol=1e-6) else omega
    n = x.shape[-2]
    at = (torch.arange(n).double() if rotary.positions is None else rotary.positions.double()) + rotary.offset
    z, rest = split_pairs(x, rotary.style, rotary.width), x[..., rotary.width :]
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):

        def low(y: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return y.to(dtype).double()

        exact = at[:, None] * omega
        for what, angle, round_table in (
            ("cosines and sines of rotary angles", exact, True),
            ("rotary frequencies", at[:, None] * low(omega), False),
            ("rotary angles", low(exact), False), ("rotary angles", low(low(at)[:, None] * low(omega)), False),
            ("rotary angles, cosines and sines", low(exact), True),
            ("rotary angles, cosines and sines", low(low(at)[:, None] * low(omega)), True),
        ):  # fmt: skip
            turn = torch.complex(*(low(y) if round_table else y for y in (angle.cos(), angle.sin())))
            yield f"{what} to {name}", join_pairs(rotary.factor * z * turn, rest, rotary.style)


def mix_layouts(x: Tensor, rotary: Rotary) -> Iterator[tuple[str, Tensor]]:
    """x·cos + rot(x)·sin with one pairing in rot and the other in the order of cos and sin, each with its name."""
    n, r, rest = x.shape[-2], rotary.width, x[..., rotary.width :].double()
    at = (torch.arange(n).double() if rotary.positions is None else rotary.positions.double()) + rotary.offset
    angle = at[:, None] * rotary.omega.double()
    tables = {"halves": torch.cat([angle, angle], -1), "pairs": angle.repeat_interleave(2, -1)}
    for one, other in (STYLES, STYLES[::-1]):
        z = split_pairs(x, one, r)
        turned = join_pairs(torch.complex(-z.imag, z.real), rest, one)[..., :r]
        mixed = x[..., :r].double() * tables[other].cos() + turned * tables[other].sin()
        said = f"B rotates {_name_style(one)} with the angles of {_name_style(other)}"
        yield (
            f"{said}: cos and sin are laid out in another way than x is rotated.",
            torch.cat([rotary.factor * mixed, rest], -1),
        )


def recover_angles(a: Tensor, b: Tensor, style: str, tolerance: float) -> Tensor | None:
    """Angles [B, N, D/2] that take a [B, H, N, D] to b, alike in all heads; None if no such rotation does."""
    if a.shape != b.shape or a.shape[1] < 2 or a.shape[-1] % 2:
        return None
    x, y = (split_pairs(one, style, one.shape[-1]) for one in (a, b))
    angle = (y * x.conj()).sum(1).angle()
    gone = (x * torch.polar(torch.ones_like(angle), angle)[:, None] - y).norm()
    return angle if float(gone) <= tolerance * float(y.norm()) else None


def turn_by(x: Tensor, angle: Tensor, style: str) -> Tensor:
    """x [B, H, N, D] with its pairs turned by angles [B, N, D/2]."""
    z = split_pairs(x, style, x.shape[-1]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return join_pairs(z, x[..., x.shape[-1] :], style)


def recover(before: Tensor, after: Tensor, tolerance: float = FITS) -> Rotary | None:
    """The rotation that takes `before` to `after`, both [B, H, N, D]; None if there is none."""
    if before.shape != after.shape or before.shape[-2] < 3:
        return None
    sizes = [x.double().norm(dim=-1) for x in (before, after)]
    ratio = (sizes[0] * sizes[1]).sum() / sizes[0].square().sum().clamp_min(1e-30)
    if float((sizes[1] - ratio * sizes[0]).norm()) > 0.2 * float(sizes[1].norm()):
        return None  # a rotation keeps sizes, but for the factor of its dims
    best: Rotary | None = None
    width = before.shape[-1]
    widths = [w for w in range(width - width % 2, 1, -2) if _rest_is_left(before, after, w, tolerance)]
    for r in sorted({*widths[:1], *widths[-1:], *(w for w in widths if w in (width // 2, width // 4))}, reverse=True):
        for style in STYLES:
            found = _fit(before, after, style, r)
            if found is not None and (best is None or found.error < 0.5 * best.error):
                best = found
    return best if best is not None and best.error <= tolerance else None


def _rest_is_left(before: Tensor, after: Tensor, width: int, tolerance: float) -> bool:
    rest = before[..., width:].double(), after[..., width:].double()
    return float((rest[0] - rest[1]).norm()) <= tolerance * float(rest[0].norm()) + 1e-12


def _fit(before: Tensor, after: Tensor, style: str, width: int) -> Rotary | None:
    x, y = split_pairs(before, style, width), split_pairs(after, style, width)
    product = (y * x.conj()).flatten(0, 1).sum(0)  # [N, r/2]: phases by position, weighted by their size
    size = x.abs().square().flatten(0, 1).sum(0)
    factor = float((product.abs().sum() / size.sum().clamp_min(1e-30)).real)
    step = (product[1:] * product[:-1].conj()).sum(0)
    omega = step.angle()
    n = product.shape[0]
    omega = _refine(product, omega)
    at = torch.arange(n).double()[:, None]
    phase = (product * torch.polar(torch.ones(n, len(omega)).double(), -at * omega)).sum(0).angle()
    offset = _fit_offset(phase, omega)
    found = Rotary(style, width, omega, offset, factor)
    gone = float((rotate(before, found) - after.double()).norm() / after.double().norm().clamp_min(1e-30))
    return replace(found, error=gone) if math.isfinite(gone) else None


def _refine(product: Tensor, omega: Tensor) -> Tensor:
    """Phases over longer and longer distances make the frequencies exact, because each is known within half a turn."""
    n = product.shape[0]
    lag = 2
    while lag < n:
        step = (product[lag:] * product[:-lag].conj()).sum(0).angle()
        turns = torch.round((lag * omega - step) / (2 * math.pi))
        omega = (step + 2 * math.pi * turns) / lag
        lag *= 2
    return omega


def _fit_offset(phase: Tensor, omega: Tensor) -> float:
    """The number of positions c for which phase = c·ω, modulo whole turns; 0 if there is none."""
    if float(phase.abs().max()) < 1e-3:
        return 0.0
    tried = torch.cat([torch.arange(-4096, 4097).double(), torch.arange(-64, 65).double() / 2])
    error = (
        torch.polar(torch.ones(len(tried), len(omega)).double(), tried[:, None] * omega - phase).sub(1).abs().sum(-1)
    )
    at = int(error.argmin())
    return float(tried[at])


def explain_rotation(a: Rotary, b: Rotary) -> tuple[str, str]:
    """(what differs, the sentence) of two recovered rotations; empty where they are the same."""
    still = [float(one.omega.abs().max()) < 1e-4 for one in (a, b)]
    if still[0] != still[1]:
        return "rotary missing", f"{'B' if still[1] else 'A'} leaves out rotary positions."
    if a.width != b.width:
        said = f"rotary positions turn {a.width} dims of a head in A and {b.width} in B"
        return "rotary fraction", f"{said}: the partial rotary factor differs."
    if a.style != b.style:
        said = f"rotary positions pair dims as {_say_style(a)} in A and {_say_style(b)} in B"
        return "rotary pairing", f"{said}: rotate_half and interleaved pairs are mixed up."
    if abs(a.factor / b.factor - 1) > 1e-3:
        f = b.factor / a.factor
        said = f"rotary positions multiply by {a.factor:.5g} in A and {b.factor:.5g} in B (× {f:.4f}{name_factor(f)})"
        return "rotary factor", f"{said}: YaRN's attention factor."
    if bool(torch.allclose(a.omega, b.omega, rtol=2e-3, atol=2e-5)):
        by = b.offset - a.offset
        said = (
            f"rotary positions are {abs(by):g} too {'large' if by > 0 else 'small'} in B: they begin at another place."
        )
        return ("rotary offset", said) if abs(by) > 0.25 else ("", "")
    if float((a.omega + b.omega).abs().max()) < 1e-3 < float(a.omega.abs().max()):
        return "rotary sign", "rotary positions turn the other way in B: the sign of the sine differs."
    if a.base is None or b.base is None:
        said = f"rotary frequencies are scaled in {'A' if a.base is None else 'B'} only, or otherwise"
        return "rotary scaling", f"{said} (rope scaling: llama3, YaRN, NTK, longrope)."
    scaled = float((b.omega / a.omega).median())
    if abs(a.base / b.base - 1) < 0.01 and abs(scaled - 1) > 1e-3:
        said = f"rotary angles are {scaled:.4g} times A's in B"
        return "rotary scaling", f"{said}: positions are scaled (linear interpolation) in one of them."
    said = f"rotary positions have base {round_base(a.base)} in A and {round_base(b.base)} in B"
    return "rotary base", f"{said} (rope_theta)."


def _say_style(one: Rotary) -> str:
    return _name_style(one.style)


def _name_style(style: str) -> str:
    return "halves (j, j + r/2)" if style == "halves" else "pairs (2j, 2j + 1)"
