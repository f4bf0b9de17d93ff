"""Cases of `python -m bench small`: calls so short that the host's work counts, seen before and without gradients."""

from __future__ import annotations

from functools import partial

import torch

from bench import attention, rows
from bench.measure import Case

CALLS = 10  # in a sample: long enough for the clock, shorter than a time slice


def cases(device: str, quick: bool) -> list[Case]:
    """Return the cases, the same on every device; there are too few to leave any out where it must be `quick`."""
    shape, given = attention.Shape(1, 8, 32, 64, causal=False), dict(dtype=torch.float32, device=device)
    attend = partial(attention._forward, shape, **given)
    found = [
        Case(f"softmax, forward {shape}", partial(attend, stats=False), CALLS),
        Case(f"entmax15, forward {shape}", partial(attend, normalizer="entmax15", stats=False), CALLS),
        Case(f"softmax + all statistics, forward {shape}", attend, CALLS),
    ]
    for name in ("softmax", "entmax15"):
        prepare = partial(rows._forward, name, (64, 128), **given)
        found.append(Case(f"{name} forward 64 × 128", prepare, CALLS))
    return found
