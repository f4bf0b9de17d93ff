"""The Jacobian of a nearly one-hot softmax is nearly zero, in proportion to what is missing from 1."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, near

GAPS = [0.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0]


@claim(
    statement="As s tends to one-hot, the Jacobian tends to 0.",
    derivation=[
        r"J = \mathrm{diag}(s) - s s^{\top}, \quad \mathrm{tr}\,J = 1 - \sum_i s_i^2",
        r"s_{\max} = 1 - \varepsilon \Rightarrow \varepsilon \le \mathrm{tr}\,J \le 2\varepsilon, \quad \|J\|_F "
        r"\le \mathrm{tr}\,J",
    ],
    rule="Holds if ‖J‖ falls below 1e-12 where 1 − w_max does, in proportion to it.",
)
def measure(sampler):
    z = sampler.normal(8).double()
    z[0] = z[1:].max()
    lift = torch.zeros(8, dtype=torch.float64)
    lift[0] = 1.0
    rows = torch.stack([z + gap * lift for gap in GAPS])
    missing = regard.softmax(rows)[:, 1:].sum(-1)  # 1 − w_max, without the subtraction
    norm = torch.linalg.matrix_norm(regard.jacobian(rows))
    gain = regard.statistics.of_scores(rows).gradient_gain
    slope = (norm[-1] / norm[-3]).log() / (missing[-1] / missing[-3]).log()
    series = {"‖J‖": (missing, norm), "gradient gain tr J": (missing, gain)}
    return conclude(
        below(f"‖J‖ when the largest weight is 1 − {float(missing[-1]):.1e}", 1e-12, norm[-1]),
        near("exponent b of ‖J‖ ∝ (1 − w_max)^b", 1.0, slope, 1e-3).ours(),
        near("tr J / (1 − w_max) at the one-hot end", 2.0, gain[-1] / missing[-1], 1e-6).ours(),
        alt="Norm and trace of the Jacobian fall in proportion to one minus the largest weight, over "
        f"{int((missing[0] / missing[-1]).log10())} decades.",
        figure=Figure("lines", "1 − largest weight", "size of the Jacobian", series, log="xy"),
    )
