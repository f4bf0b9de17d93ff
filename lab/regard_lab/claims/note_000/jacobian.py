"""The Jacobian of softmax, against differences of the function itself, with the notes' two slips."""

import torch

import regard
from regard_lab.claim import Figure, above, below, claim, conclude, gap


def finite_differences(function, z, step=1e-5):
    """Return ∂f_i/∂z_j by central differences, column by column."""
    columns = [(function(z + e) - function(z - e)) / (2 * step) for e in step * torch.eye(len(z), dtype=z.dtype)]
    return torch.stack(columns, -1)


@claim(
    note="000, 002, 004",
    statement="∂s_i/∂z_j = s_i(1{i=j} − s_j), that is diag(s) − s sᵀ; 002 writes the off-diagonal entry as −a_j·a_j, "
    "000 the log-sum-exp's derivative as s_l.",
    derivation=[
        r"\log s_i = z_i - \mathrm{lse}(z), \quad \partial\,\mathrm{lse}/\partial z_j = e^{z_j} / \sum_l e^{z_l} = s_j",
        r"\partial s_i/\partial z_j = s_i\,\partial \log s_i/\partial z_j = s_i (1_{i=j} - s_j)",
    ],
    rule="Core: the closed form must match differences of the function to 1e-8. Beyond: the two formulas as printed.",
)
def measure(sampler):
    z = sampler.normal(6).double()
    s = regard.softmax(z)
    measured = finite_differences(regard.softmax, z)
    formula = torch.diag(s) - s[:, None] * s
    printed = torch.where(torch.eye(6, dtype=torch.bool), formula, -(s * s)[:, None])  # 002: −a_j·a_j in row j
    lse = finite_differences(lambda x: regard.logsumexp(x)[None], z)[0]
    return conclude(
        below("largest |diag(s) − s sᵀ − measured|", 1e-8, gap(formula, measured)),
        below("largest |regard.jacobian − measured|", 1e-8, gap(regard.jacobian(z), measured)).ours(),
        below("largest |∂ lse/∂z_j − s_j|", 1e-8, gap(lse, s)).ours(),
        below("off-diagonal printed −a_j·a_j (note 002)", 1e-8, gap(printed, measured)).beyond(),
        below("∂ lse/∂z_j printed s_l, l ≠ j (note 000)", 1e-8, gap(lse, s.roll(1))).beyond(),
        above("asymmetry of the matrix printed in 002", 1e-8, gap(printed, printed.T)).ours(),
        condition="two misprints are read as meant: off the diagonal −a_j·a_k (002 prints −a_j·a_j), and ∂ lse/∂z_j "
        "= s_j (000 prints s_l)",
        alt="The Jacobian of a softmax over six scores: positive on the diagonal, negative and symmetric off it.",
        figure=Figure("heat", "score j", "weight i", rows=measured.tolist()),
    )
