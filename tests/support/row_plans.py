"""Forces launch numbers on the row kernels, so that small rows reach every kernel and stage."""

import math

import torch

from regard._backends.gpu.rows import launch
from regard._backends.gpu.rows.plan import BACKWARD, FORWARD, Cut

KERNELS = {kernel.name: kernel for kernel in (*FORWARD, *BACKWARD)}


def force_cut(monkeypatch, cut: Cut, backward: Cut | None = None) -> None:
    """Has every call take a tile kernel with this cut, and fills outputs and scratch with NaN first."""
    monkeypatch.setattr(launch, "choose", lambda rows: choose(rows, cut, backward or cut))
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(launch.torch, "empty_like", lambda x: empty_like(x).fill_(math.nan))
    monkeypatch.setattr(launch.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))


def choose(rows, cut: Cut, backward: Cut):
    """The tile kernel of these rows that can take the cut."""
    if rows.direction != "forward":
        return next(k for k in BACKWARD if k.supports(rows) is None), backward
    name = "forward_ratio"
    if rows.kind == "threshold":
        name = "forward_threshold"
        if cut.rows > 1:  # several rows to a program only in lanes
            name, cut = "forward_threshold_short", cut._replace(lanes=16)
    elif rows.kind == "softmax" and rows.size == 4:
        name, cut = "forward_exact", cut._replace(lanes=cut.lanes or cut.columns)
    elif rows.kind == "pointwise" and cut.again:
        name = "forward_pointwise"
        cut = cut._replace(columns=32, parts=2, step=16) if cut.parts > 1 else cut._replace(step=16)
    return KERNELS[name], cut
