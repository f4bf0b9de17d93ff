"""Which rows pass through shared memory: in a ring (`rows_ring.py`), or filling its places (`rows_places.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def takes(s: Tensor, family: str, mask: Tensor | None, faint: bool) -> bool:
    """Are these rows long, many, and such that 16 bytes of them can be copied at a time?"""
    (R, N), size = s.shape, s.element_size()
    others = OTHERS.get((family, size))
    if others is None or not s.is_cuda or mask is not None or faint or N % 16 or s.data_ptr() % 16:
        return False
    device = torch.cuda.get_device_properties(s.device)
    return others < N * size <= max(CUTS) and device.major == 9 and device.multi_processor_count < 2 * R


def forward(
    s: Tensor, p: Tensor, state: Tensor, F: Any, traits: Any, scale: float, theta: float, tolerance: float
) -> None:
    """Fill p and state."""
    from regard.kernels.rows_overlong import Overlong, forward_overlong
    from regard.kernels.rows_ring import Ring, forward_ring
    from regard.kernels.rows_solved import Solved, forward_solved

    (R, N), size = s.shape, s.element_size()
    solves, quick = F.family == "threshold", bool(F.exponential) and size == 4
    cuts = CUTS_OF_THRESHOLDS[size] if solves else CUTS
    chunk_bytes, warps, together = next(cut for most, cut in cuts.items() if N * size <= most)
    chunk = chunk_bytes // size
    chunks = -(-N // chunk)
    programs = min(torch.cuda.get_device_properties(s.device).multi_processor_count * together, R)
    phases = PHASES if PHASES * programs <= R else 1
    cut = dict(F=F, CHUNK=chunk, VECTOR=16 // size, EVEN=chunks * chunk == N, PHASES=phases)
    how = dict(TRAITS=traits, SCALED=scale != 1.0, QUICK=quick, CAREFUL=quick or (size == 4 and traits.differs))
    numbers = [float(scale)]
    if solves:
        kernel, config = forward_solved, Solved(HELD=chunks - 2, TOLERANCE=tolerance, **cut)
        numbers.append(theta)
    elif chunks > CHUNKS:
        kernel, config = forward_overlong, Overlong(HELD=chunks - 2, **cut, **how)
    else:
        kernel, config = forward_ring, Ring(CHUNKS=chunks, SLOTS=SLOTS, **cut, **how)
    registers = 65536 // (32 * warps * together) // 8 * 8
    with torch.cuda.device(s.device):
        kernel[(programs,)](s, p, state, R, N, *numbers, config, num_warps=warps, maxnreg=registers)
