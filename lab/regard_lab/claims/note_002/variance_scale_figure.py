"""The figure's 15 points are right; the curve through them is the spline's invention."""

import numpy as np
import torch
from scipy.interpolate import make_interp_spline

import regard
from regard_lab.claim import Figure, above, below, claim, conclude, gap

LOGITS = torch.linspace(-3.5, 3.5, 15, dtype=torch.float64)
SCALES = [0.01, 0.1, 1.0, 5.0, 10.0, 100.0]
FINE = np.linspace(0, 14, 300)


def spline(scale):
    return make_interp_spline(np.arange(15), regard.softmax(scale * LOGITS).numpy(), k=3)(FINE)


def between(scale):
    """Return softmax weights at scores between the 15, over the same denominator, which a curve should show."""
    scores = torch.from_numpy(np.interp(FINE, np.arange(15), LOGITS.numpy()))
    return torch.exp(scale * scores - regard.logsumexp(scale * LOGITS)).numpy()


@claim(
    statement="The figure of softmax under scales 0.01 … 100 (drawn with a cubic spline through 15 points): small "
    "scales are near uniform, large ones near one-hot.",
    derivation=[
        r"\mathrm{Var}(s x) = s^2\,\mathrm{Var}(x)",
        r"\text{a cubic through } (0, \dots, 0, 1) \text{ must swing below } 0; \text{ the script clips what it drew}",
    ],
    rule="Core: the points at scales 0.01 and 100. Beyond: the curve between them must be a curve of weights.",
)
def measure(sampler):
    flat, sharp = regard.softmax(0.01 * LOGITS), regard.softmax(100.0 * LOGITS)
    dips = [float(spline(s).min()) for s in SCALES]
    misses = [float(np.abs(np.clip(spline(s), 0, None) - between(s)).max()) for s in SCALES]
    series = {
        "spline, as drawn but unclipped": (FINE, spline(10.0)),
        "exp(s·x − lse)": (FINE, between(10.0)),
        "the 15 points": (range(15), regard.softmax(10.0 * LOGITS)),
    }
    return conclude(
        below("largest |w − 1/15| of the points at scale 0.01", 0.01, gap(flat, 1 / 15)),
        above("largest weight of the points at scale 100", 0.999, sharp.max()),
        above("lowest value of the drawn curve before clipping", -1e-9, min(dips)).beyond(),
        below("largest |curve − exp(s·x − lse)| between the points", 0.02, max(misses)).beyond(),
        condition=f"only the 15 points are read: the cubic spline between them dips to {min(dips):.2f} before "
        f"clipping and is off by up to {max(misses):.2f}; and its “variance scale” s multiplies the variance by s²",
        alt="At scale 10 the spline swings below zero before its last point, where the true curve stays at zero.",
        figure=Figure("lines", "logit index", "scale 10: weight", series, unjoined=["the 15 points"]),
    )
