"""Variants, presets and the loss figure of experiments over d_k: a character model of width 256 with 256/d_k heads.

Parameters and tokens are equal; only d_k (16, 64 or 256) varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from regard_lab.figure import Figure
from regard_lab.training.experiment import Preset
from regard_lab.training.results import final_bands

WIDTH = 256
DIMS = (16, 64, 256)


def variants(kinds: Mapping[str, Callable[[int], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return "KIND-dD" → options; a kind maps d_k to the attention's options."""
    return {f"{kind}-d{d}": {"heads": WIDTH // d, "attention": of(d)} for kind, of in kinds.items() for d in DIMS}


def sizes(layers: int, length: int, batch: int, rows: int) -> dict[str, int]:
    """Return the sizes of batches of `batch` rows of `length` characters; an evaluation reads `rows` rows."""
    return {"layers": layers, "width": WIDTH, "length": length, "batch": batch, "validation": rows * length}


FULL = Preset(
    steps=500, every=100, sizes=sizes(layers=2, length=128, batch=16, rows=64)
)  # of `scale` and `normalizers` alike


def loss_figure(result: dict, kinds: Iterable[str]) -> Figure:
    """Draw the validation loss of each kind against d_k."""
    loss = {kind: final_bands(result, {d: f"{kind}-d{d}" for d in DIMS}) for kind in kinds}
    means = "; ".join(f"{kind} {', '.join(f'{y:.4g}' for y in columns[2])}" for kind, columns in loss.items())
    words = f"Validation loss at d_k 16, 64 and 256 with 95 % intervals over seeds: {means}."
    return Figure("bands", "d_k", "validation loss", loss, log="x", alt=words)
