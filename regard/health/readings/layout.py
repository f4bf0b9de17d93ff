"""What a reading holds of a layer, and where: every sum in one row of float64, so that it travels at once.

Curves are kept over bins of positions: one each for the first 16, then 8 to an octave.

>>> from regard.health.readings.layout import position_bin, position_of
>>> [position_of(at) for at in position_bin(torch.tensor([3, 16, 1000])).tolist()]
[3, 16, 940]
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from regard.health.readings.histogram import NAMES

CURVES = ("entropy_ratio", "max_weight", "distance")  # followed over the query's position
POSITIONS = 144  # bins of positions, up to 2²⁰
FINGERPRINT = 4  # features per row that tell one head's distribution from another's


def _shapes(heads: int) -> dict[str, tuple[int, ...]]:
    """What a reading holds beside its histogram."""
    rows, places = (len(NAMES), heads), (len(CURVES), heads, POSITIONS)
    return dict(
        count=rows,
        mean=rows,
        square=rows,  # Σ (x − mean)²
        low=rows,
        high=rows,
        curve=places,
        curve_count=places,
        products=(FINGERPRINT, heads, heads),  # Σ f_g·f_h over rows
        totals=(FINGERPRINT, heads),
        compared=(heads,),  # rows behind products
        predicted=(heads,),  # Σ over calls of the logit variance that the norms predict
        calls=(),  # behind predicted
    )


@lru_cache(maxsize=64)
def places(heads: int) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Per name, (start, end, shape) within `flat`."""
    found, start = {}, 0
    for name, shape in _shapes(heads).items():
        found[name] = start, start + math.prod(shape), shape
        start += math.prod(shape)
    return found


@lru_cache(maxsize=16)
def empty(heads: int, device: torch.device) -> Tensor:
    """The sums of a reading of nothing."""
    extremes = dict(low=math.inf, high=-math.inf)
    parts = [torch.full((math.prod(shape),), extremes.get(name, 0.0)) for name, shape in _shapes(heads).items()]
    return torch.cat(parts).double().to(device)


def position_bin(position: Tensor) -> Tensor:
    log = 16 + torch.floor(8.0 * torch.log2(position.clamp_min(1).double() / 16.0) + 1e-9)
    return torch.where(position < 16, position.double(), log).clamp_max(POSITIONS - 1).long()


@lru_cache(maxsize=4)
def position_bins(start: int, queries: int, batch: int, device: torch.device) -> Tensor:
    return position_bin(torch.arange(start, start + queries, device=device)).repeat(batch)


def position_of(at: int) -> int:
    """The first position of a bin."""
    return at if at < 16 else math.ceil(16 * 2 ** ((at - 16) / 8) - 1e-6)
