"""Which rows pass through shared memory: in a ring (`rows_ring.py`), or filling its places (`rows_places.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._core.device import sm_count, supports_gluon

SLOTS, CHUNKS = 6, 4  # chunks in the ring, and of a row: half of the next one fits beside it
PHASES = 16  # of programs that have at least as many rows
# by the most bytes of a row: those of a chunk, the warps of a program, programs to a multiprocessor
CUTS = {262144: (32768, 16, 1)}
CUTS_OF_THRESHOLDS = {
    2: {16384: (4096, 4, 8), 32768: (8192, 4, 4), 65536: (8192, 8, 3), 131072: (16384, 8, 2), 262144: (32768, 16, 1)},
    4: {65536: (8192, 8, 2), 131072: (16384, 8, 2), 262144: (32768, 16, 1)},
}  # and by the bytes of a number
# the most bytes of a row that other kernels do as well, by family and bytes of a number
OTHERS = {("threshold", 2): 8192, ("threshold", 4): 32768, ("proportional", 2): 65536}
OTHERS |= {(family, size): 65536 for family in ("exponential", "ratio") for size in (2, 4)}
# the same backward, in 16 bits, of both tensors' rows together
CUTS_BACK = {131072: (16384, 8, 2), 262144: (32768, 16, 1)}
OTHERS_BACK = {"threshold": 32768, "exponential": 131072, "proportional": 131072, "ratio": 131072}


def takes(s: Tensor, family: str, mask: Tensor | None, faint: bool) -> bool:
    """Are these rows long, many, and such that 16 bytes of them can be copied at a time?"""
    others, bytes = OTHERS.get((family, s.element_size())), s.shape[1] * s.element_size()
    return mask is None and not faint and others is not None and others < bytes <= max(CUTS) and _suits(s)


def takes_back(dp: Tensor, saved: Tensor, F: Any, family: str, mask: Tensor | None, faint: bool) -> bool:
    """Likewise; and are slopes those of a weight, or of a score that ends by itself at −inf?"""
    others, bytes = OTHERS_BACK.get(family), 2 * dp.shape[1] * dp.element_size()
    known = F.slope_of_weight is not None or (F.family == "ratio" and F.shift != "none")
    if mask is not None or faint or others is None or not known or dp.element_size() != 2:
        return False
    return others < bytes <= max(CUTS_BACK) and dp.dtype == saved.dtype and _suits(dp) and _suits(saved)


def _suits(s: Tensor) -> bool:
    if not s.is_cuda or s.shape[1] % 16 or s.data_ptr() % 16:
        return False
    return supports_gluon(s.device) and sm_count(s.device) < 2 * s.shape[0]


def forward(
    s: Tensor, p: Tensor, state: Tensor, F: Any, traits: Any, scale: float, theta: float, tolerance: float
) -> None:
    """Fill p and state."""
    from regard._backends.gpu.rows.resident.overlong import Overlong, forward_overlong
    from regard._backends.gpu.rows.resident.ring import Ring, forward_ring
    from regard._backends.gpu.rows.resident.threshold import Solved, forward_solved

    (R, N), size = s.shape, s.element_size()
    solves, quick = F.family == "threshold", bool(F.exponential) and size == 4
    chunks, cut, options = _cut(s, F, size, CUTS_OF_THRESHOLDS[size] if solves else CUTS)
    how = dict(TRAITS=traits, SCALED=scale != 1.0, QUICK=quick, CAREFUL=quick or (size == 4 and traits.differs))
    numbers = [float(scale)]
    if solves:
        kernel, config = forward_solved, Solved(HELD=chunks - 2, TOLERANCE=tolerance, **cut)
        numbers.append(theta)
    elif chunks > CHUNKS:
        kernel, config = forward_overlong, Overlong(HELD=chunks - 2, **cut, **how)
    else:
        kernel, config = forward_ring, Ring(CHUNKS=chunks, SLOTS=SLOTS, **cut, **how)
    with torch.cuda.device(s.device):
        kernel[options.pop("grid")](s, p, state, R, N, *numbers, config, **options)


def backward(
    dp: Tensor, saved: Tensor, ds: Tensor, state: Tensor, F: Any, traits: Any, scale: float, theta: float
) -> None:
    """Fill ds."""
    from regard._backends.gpu.rows.resident.backward import Down, backward_down

    chunks, cut, options = _cut(dp, F, 4, CUTS_BACK)
    config = Down(TRAITS=traits, HELD=chunks - 2, **cut)
    with torch.cuda.device(dp.device):
        backward_down[options.pop("grid")](dp, saved, ds, state, *dp.shape, float(scale), theta, config, **options)


def _cut(s: Tensor, F: Any, size: int, cuts: dict) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(chunks of a row, what every kernel is compiled for, its launch), `size` bytes to a column."""
    R, N = s.shape
    chunk_bytes, warps, together = next(cut for most, cut in cuts.items() if N * size <= most)
    chunk = chunk_bytes // size
    chunks = -(-N // chunk)
    programs = min(sm_count(s.device) * together, R)
    phases = PHASES if PHASES * programs <= R else 1
    cut = dict(F=F, CHUNK=chunk, VECTOR=16 // s.element_size(), EVEN=chunks * chunk == N, PHASES=phases)
    registers = 65536 // (32 * warps * together) // 8 * 8
    return chunks, cut, dict(grid=(programs,), num_warps=warps, maxnreg=registers, enable_fp_fusion=True)
