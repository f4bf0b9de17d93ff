"""The gradient that reaches a query: unscaled, its median collapses while its mean does not."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, exponent, listed, near, quantile, ratio

DIMS, KEYS, ROWS = [16, 64, 256, 1024], 10, 500
FLOOR = 1e-12  # what is less is drawn here


def gradients(sampler, d, scale):
    """Return ‖∂L/∂q‖ of independent queries over 10 keys; values and ∂L/∂out do not depend on d."""
    q = sampler.normal(ROWS, 1, 1, d).requires_grad_()
    k, v = sampler.normal(ROWS, 1, KEYS, d), sampler.normal(ROWS, 1, KEYS, 16)
    out = regard.attention(q, k, v, scale=scale)
    (dq,) = torch.autograd.grad(out, q, sampler.normal(ROWS, 1, 1, 16) / 4)
    return dq.flatten(1).norm(dim=-1)


@claim(
    statement="Unscaled, the norm of ∂L/∂Q falls as 1/d_k; scaled, it is constant.",
    derivation=[
        r"\partial L/\partial q = c\,K^{\top} J\,g, \quad \|K^{\top} x\| \approx \sqrt{d_k}\,\|x\|, \quad c = 1 "
        r"\text{ or } 1/\sqrt{d_k}",
        r"\text{unscaled: } \|J\| \sim e^{-\mathrm{gap}},\; \mathrm{gap} \sim \sqrt{d_k}: \text{ median } "
        r"\sqrt{d_k}\,e^{-\gamma\sqrt{d_k}},\; \gamma \approx 0.4",
        r"\text{but } P(\mathrm{gap} < 1) \sim 1/\sqrt{d_k} \text{ keeps the mean near } \sqrt{d_k}/\sqrt{d_k} = 1",
    ],
    rule="Wrong if the unscaled mean's exponent is not −1 ± 0.3 or the median does not fall 16-fold from 64 to 1024.",
)
def measure(sampler):
    unscaled = torch.stack([gradients(sampler, d, "none") for d in DIMS])
    scaled = torch.stack([gradients(sampler, d, "sqrt") for d in DIMS])
    medians = [quantile(row, 0.5) for row in unscaled]
    fall = ratio(medians[3], medians[1])
    series = {
        name: (DIMS, *(row.quantile(p, -1).clamp_min(FLOOR) for p in (0.1, 0.5, 0.9)))
        for name, row in (("unscaled", unscaled), ("scaled", scaled))
    }
    floor = {f"{FLOOR:g} or less": FLOOR} if unscaled.quantile(0.1, -1).min() < FLOOR else {}
    return conclude(
        near("unscaled: exponent b of mean ‖∂L/∂q‖ ∝ d_k^b", -1.0, exponent(DIMS, unscaled), 0.3),
        near("unscaled: median ‖∂L/∂q‖, d_k = 1024 over d_k = 64", 1 / 16, fall, 0.02),
        near("scaled: exponent b of mean ‖∂L/∂q‖ ∝ d_k^b", 0.0, exponent(DIMS, scaled), 0.1),
        below("unscaled: the median's fall is steeper than 1/d_k", 0.04, fall).ours(),
        right="Scaled, it is constant. Unscaled there is no power law 1/d_k: the mean stays near 1, carried by the "
        f"few rows whose two best keys nearly tie, while the median falls exponentially in √d_k "
        f"({listed('{:.2g}', medians)} at d_k = {listed('{}', DIMS)}).",
        alt=f"From d_k {DIMS[0]} to {DIMS[-1]} the unscaled gradient's median falls from {_ends(unscaled, 0.5)}, "
        f"its lower decile from {_ends(unscaled, 0.1)}, and its upper decile goes from {_ends(unscaled, 0.9)}; "
        f"scaled, the median goes from {_ends(scaled, 0.5)}.",
        figure=Figure("bands", "d_k", "‖∂L/∂q‖: median, 10 to 90 %", series, log="xy", guides=floor),
    )


def _ends(rows, p):
    first, *_, last = rows.quantile(p, -1, interpolation="nearest")  # as the medians of the checks
    return f"{first:.2g} to {last:.2g}"
