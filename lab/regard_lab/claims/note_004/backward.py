"""The gradient of softmax from its output alone."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap

LENGTHS = [16, 64, 256, 1024]


@claim(
    statement="s·(g − Σ s·g) is the gradient, with no Jacobian built.",
    derivation=[
        r"J^{\top} g = (\mathrm{diag}(s) - s s^{\top}) g = s \odot g - s\,(s^{\top} g) = s \odot (g - s^{\top} g)"
    ],
    rule="Holds if it equals Jᵀg to rounding and the function's differences to 1e-8.",
)
def measure(sampler):
    z, g = 3 * sampler.normal(20, 16).double(), sampler.normal(20, 16).double()
    s = regard.softmax(z)
    closed = s * (g - (s * g).sum(-1, keepdim=True))
    dense = (regard.jacobian(z).transpose(-1, -2) @ g[..., None]).squeeze(-1)
    step = 1e-6
    shifts = step * torch.eye(16, dtype=torch.float64)[:, None]  # one score at a time
    slopes = ((regard.softmax(z + shifts) - regard.softmax(z - shifts)) * g).sum(-1).T / (2 * step)
    rows = [regard.softmax(sampler.normal(n)) for n in LENGTHS]
    made = [regard.softmax_backward(torch.ones_like(row), row).numel() for row in rows]
    dense_made = [regard.jacobian(row).numel() for row in rows]
    series = {"s(g − Σsg)": (LENGTHS, made), "Jacobian": (LENGTHS, dense_made)}
    return conclude(
        below("largest |s(g − Σsg) − Jᵀg|", 1e-14, gap(closed, dense)),
        below("largest |s(g − Σsg) − differences|", 1e-8, gap(closed, slopes)),
        below("largest |s(g − Σsg) − regard.softmax_backward|", 1e-14, gap(closed, regard.softmax_backward(g, s))),
        below("largest |s(g − Σsg) − regard.vjp|", 1e-13, gap(closed, regard.vjp(z, g))),
        alt=f"At n = {LENGTHS[-1]} the closed form makes {made[-1]} numbers per row, the Jacobian {dense_made[-1]}.",
        figure=Figure("lines", "row length n", "numbers made per row", series, log="xy"),
    )
