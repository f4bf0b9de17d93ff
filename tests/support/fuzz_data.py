"""Hypothesis strategies for calls of the public functions, and how many cases to try (REGARD_FUZZ, `make fuzz`)."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from regard import normalizers

CASES = int(os.environ.get("REGARD_FUZZ", "500"))
NIGHTLY = "REGARD_FUZZ" in os.environ
DTYPES = [torch.float64, torch.float32, torch.bfloat16, *([torch.float16] if NIGHTLY else [])]
SIZES = [0, 1, 2, 3, 5, 7, 13, 16, 17, 31, 64, 65, 127, 128, 129, 257, 1021]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e4, -1e4, 6e4, 1e11, -1e11, 3e38, -3e38, 1e-38, 1e-45, 5e-324]
USUAL = [1e-3, 0.1, 1.0, 10.0, 1e3]
LEVELS = [1e-40, 1e-30, 1e-20, 1e-12, 1e-6, *USUAL, 1e6, 1e9, 1e12, 1e20, 1e30, 1e38]  # of scores, all of float32
NAMES = [
    *normalizers.names(), "entmax(alpha=1)", "entmax(alpha=1.05)", "entmax(alpha=1.25)", "entmax(alpha=2)",
    "entmax(alpha=1.9)", "sigmoid(bias=-3)",
]  # fmt: skip


counts: Counter[str] = Counter()  # calls made, by test


def cases(share: float):
    """Settings for a test that takes this share of all cases (the shares add up to 1); the same in each `make test`."""
    phases = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
    how = settings(
        max_examples=max(1, int(CASES * share)), deadline=None, database=None, derandomize=not NIGHTLY, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def with_settings(test):
        if "REGARD_FUZZ_COUNTS" in os.environ:
            test.hypothesis.inner_test = counted(test.hypothesis.inner_test)
        return how(test)

    return with_settings


def counted(test):
    """The test, its calls counted as they pass; `tools/fuzz.py` reads the counts when the process has ended."""

    @functools.wraps(test)
    def test_and_count(*args, **kwargs):
        test(*args, **kwargs)
        counts[test.__name__] += 1

    return test_and_count


def leave_counts():
    if path := os.environ.get("REGARD_FUZZ_COUNTS"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(counts, file)


atexit.register(leave_counts)


@st.composite
def shapes(draw, most: int = 4096):
    """Any rank from 0 to 4, any of SIZES in one dimension, little in the others."""
    rank = draw(st.integers(0, 4))
    shape = [draw(st.sampled_from([0, 1, 2, 3, 5])) if draw(st.integers(0, 9)) == 0 else 1 for _ in range(rank)]
    for place in draw(st.lists(st.integers(0, max(rank - 1, 0)), max_size=2)):
        if rank:
            shape[place] = draw(st.sampled_from(SIZES))
    while math.prod(shape) > most:
        shape[shape.index(max(shape))] //= 2
    return tuple(shape)


@st.composite
def values(draw, shape, dtype, special: bool = True):
    """Scores of any size, tied or not, some of them special, in any memory layout."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    levels = st.sampled_from(USUAL) | st.sampled_from(LEVELS)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(levels)
    if draw(st.integers(0, 5)) == 0 and x.ndim:  # sizes that differ within a row
        x = x * torch.tensor([draw(levels) for _ in range(4)]).repeat(x.shape[-1])[: x.shape[-1]]
    x = x + draw(st.sampled_from([0.0, 0.0, 0.0, 0.0, 1e3, -1e3, 1e8]))
    if draw(st.booleans()) and draw(st.booleans()):
        x = x.round()  # ties
    if special and x.numel():
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=2)):
            where = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.02, 0.5, 1.0]))
            x = torch.where(where, value, x)
    return laid_out(draw, x.to(dtype))


def laid_out(draw, x: torch.Tensor) -> torch.Tensor:
    """The same numbers: contiguous, transposed, with gaps, or expanded."""
    kind = draw(st.sampled_from(["plain", "transposed", "gaps", "offset", "expanded"]))
    if kind == "transposed" and x.ndim >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "gaps" and x.ndim:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "offset" and x.ndim:
        wide = torch.full((x.shape[0] + 1, *x.shape[1:]), math.nan, dtype=x.dtype)
        wide[1:] = x
        return wide[1:]
    if kind == "expanded" and x.ndim and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


@st.composite
def masks(draw, shape):
    """None, or a bool mask that broadcasts to the shape; some rows may see nothing."""
    if draw(st.integers(0, 2)):
        return None
    sizes = [1 if draw(st.integers(0, 3)) == 0 else size for size in shape[draw(st.integers(0, len(shape))) :]]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.rand(sizes, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))


def steepest(z, name, dim, t, mask):
    """The largest slope of a row, of size 1 in `dim`: 1/T, and as much more as a small sum makes it."""
    seen = z / t if mask is None else (z / t).masked_fill(~mask, 0.0)
    if name not in ("relu", "softpick"):
        return torch.full_like(seen, 1.0 / t).amax(dim, keepdim=True)
    total = (seen.clamp_min(0.0) if name == "relu" else torch.expm1(seen).abs()).sum(dim, keepdim=True)
    if name == "softpick":
        return (1.0 + 1.0 / total.masked_fill(total == 0, 1.0)) / t
    return 1.0 / total.masked_fill(total == 0, 1.0) / t
