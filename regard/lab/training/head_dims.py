"""Experiments over d_k: a character model of width 256 whose heads are 16, 64 or 256 wide, 256/d_k of them.

Parameters and tokens stay equal, and only d_k varies. An experiment names what it does at each d_k, its kinds, and how
long it trains; the variants, sizes and the figure of the loss are the same for all of them.

>>> from regard.lab.training import head_dims
>>> head_dims.variants({"dot": lambda d: {"score": "dot"}})["dot-d64"]
{'heads': 4, 'attention': {'score': 'dot'}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from regard.lab.figure import Figure
from regard.lab.training.experiment import Preset
from regard.lab.training.results import ends, in_words

WIDTH = 256
DIMS = (16, 64, 256)


def variants(kinds: Mapping[str, Callable[[int], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """ "KIND-dD" → options, kind by kind; a kind gives the attention's options at a d_k."""
    return {f"{kind}-d{d}": {"heads": WIDTH // d, "attention": of(d)} for kind, of in kinds.items() for d in DIMS}


def preset(steps: int, every: int, layers: int, length: int, batch: int, rows: int, **others) -> Preset:
    """Batches of `batch` rows of `length` characters; an evaluation reads `rows` of them."""
    sizes = {"layers": layers, "width": WIDTH, "length": length, "batch": batch, "validation": rows * length}
    return Preset(steps, every, sizes, **others)


FULL = preset(500, 100, layers=2, length=128, batch=16, rows=64)  # of `scale` and `normalizers`: one model, one budget


def loss_figure(result: dict, kinds: Iterable[str]) -> Figure:
    loss = {kind: ends(result, {d: f"{kind}-d{d}" for d in DIMS}) for kind in kinds}
    told = f"Validation loss at d_k 16, 64 and 256 with 95 % intervals over seeds: {in_words(loss)}."
    return Figure("bands", "d_k", "validation loss", loss, log_x=True, alt=told)
