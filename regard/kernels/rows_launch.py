"""Which rows pass through shared memory: in a ring (`rows_ring.py`), or filling its places (`rows_places.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BYTES, SLOTS, CHUNKS, WARPS = 32768, 6, 4, 16  # of a chunk; in the ring; four of a row leave room for half of the next
LONGEST = 65536  # columns
PHASES = 16  # of programs that have at least as many rows


def takes(s: Tensor, family: str, mask: Tensor | None, faint: bool) -> bool:
    """Are these rows longer than a program can hold, many, and such that 16 bytes of them can be copied at a time?"""
    (R, N), size = s.shape, s.element_size()
    kinds = {2: ("exponential", "proportional", "ratio"), 4: ("exponential", "ratio", "threshold")}.get(size, ())
    if family not in kinds or not s.is_cuda or mask is not None or faint or N % 16 or s.data_ptr() % 16:
        return False
    device = torch.cuda.get_device_properties(s.device)
    held = 32768 if size == 2 or family == "threshold" else 16384  # by a program of another kernel
    return held < N <= LONGEST and device.major == 9 and device.multi_processor_count < 2 * R


def forward(
    s: Tensor, p: Tensor, state: Tensor, F: Any, traits: Any, scale: float, theta: float, tolerance: float
) -> None:
    """Fill p and state."""
    from regard.kernels.rows_overlong import Overlong, forward_overlong
    from regard.kernels.rows_overlong_threshold import OverlongThreshold, forward_overlong_threshold
    from regard.kernels.rows_ring import Ring, forward_ring

    (R, N), size = s.shape, s.element_size()
    chunk = BYTES // size
    chunks = -(-N // chunk)
    programs = min(torch.cuda.get_device_properties(s.device).multi_processor_count, R)
    phases = PHASES if PHASES * programs <= R else 1
    quick = bool(F.exponential) and size == 4
    cut = dict(F=F, CHUNK=chunk, VECTOR=16 // size, EVEN=chunks * chunk == N, PHASES=phases)
    how = dict(TRAITS=traits, SCALED=scale != 1.0, QUICK=quick, CAREFUL=quick or (size == 4 and traits.differs))
    numbers, options = [float(scale)], dict(num_warps=WARPS) | (dict(maxnreg=128) if quick else {})
    kernel, config = forward_ring, Ring(CHUNKS=chunks, SLOTS=SLOTS, **cut, **how)
    if F.family == "threshold":
        kernel, config = forward_overlong_threshold, OverlongThreshold(HELD=chunks - 2, TOLERANCE=tolerance, **cut)
        numbers.append(theta)
    elif chunks > CHUNKS:
        kernel, config = forward_overlong, Overlong(HELD=chunks - 2, **cut, **how)
    with torch.cuda.device(s.device):
        kernel[(programs,)](s, p, state, R, N, *numbers, config, **options)
