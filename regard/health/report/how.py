"""The `how` part of a report: model, device, fidelity check, versions."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import regard
from regard.health import findings
from regard.health.measurement import norms, recorder
from regard.health.measurement.recorder import Layer
from regard.health.readings import histogram

THREE_DIMS = "called with (N, L, d), which does not separate heads from sequences: measured as one head"
FIRST_BINS = {
    "shares": "mass",
    "entropy_ratio": "entropy_ratio",
    "entropy": "entropy",
    "logit_variance": "logit_variance",
    "numbers of keys, distance": "distance",
}


def describe_measurement(
    model: nn.Module,
    parameters: int,
    layers: Sequence[Layer],
    batches: int,
    seconds: float,
    using: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """How the numbers of a report were measured, as plain values."""
    measured = [layer for layer in layers if layer.reading is not None]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sampled = any(layer.sampled for layer in measured)
    rows = f"on {norms.SAMPLED_ROWS} rows of each call" if sampled else "on every counted row"
    together = [layer.name for layer in measured if layer.together]
    three_dims = [layer.name or type(model).__name__ for layer in measured if layer.three_dims]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    edges = ", ".join(f"{what} below {histogram.least(name):.2g}" for what, name in FIRST_BINS.items())
    return dict(
        model=type(model).__name__,
        parameters=parameters,
        batches=batches,
        seconds=round(seconds, 3),
        device=f"{device.type}: {name}",
        dtypes=sorted({str(layer.dtype).removeprefix("torch.") for layer in measured}),
        paths=dict(Counter(layer.kind for layer in measured)),
        faithful=dict(
            checked=f"output rebuilt from the measured weights compared with the model's own, {rows}",
            largest_relative_difference=max((layer.error for layer in measured), default=0.0),
            goes_on_with=f"the model's own output; beyond {recorder.WHOLE} queries the rebuilt one, if it agrees",
        ),
        looked_for=findings.kinds(),
        counted="rows of padding queries and rows without a visible key are not counted",
        **({"used_too_often_to_be_layers_each": together} if together else {}),
        **({"using": list(using)} if using else {}),
        **({"three_dims": dict(layers=three_dims, means=THREE_DIMS)} if three_dims else {}),
        quantiles="from histograms of 512 fixed bins, accurate to one bin width; a value in the first bin is only "
        f"known to be below its edge: {edges}",
        versions=dict(regard=regard.__version__, torch=torch.__version__, python=platform.python_version()),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
