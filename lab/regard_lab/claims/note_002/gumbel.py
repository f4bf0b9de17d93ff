"""The argmax of z + Gumbel noise is a sample of softmax(z); the soft one can be differentiated."""

import torch

import regard
from regard_lab.claim import Figure, above, claim, conclude, mean, near, share

Z = torch.tensor([2.0, 1.0, 0.0, -1.0])


@claim(
    statement="Gumbel noise and a temperature make softmax a differentiable sampler.",
    derivation=r"P(\mathrm{arg}\,\max_j (z_j + g_j) = i) = \int e^{-(x - z_i)} e^{-Z e^{-x}} dx = e^{z_i}/Z, \quad Z = "
    r"\textstyle\sum_j e^{z_j}",
    rule="Holds if hard samples have softmax's frequencies to 0.03, cold soft ones are nearly one-hot and gradients "
    "flow.",
)
def measure(sampler):
    rows = Z.expand(25000, 4)
    hard = regard.gumbel_softmax(rows, 0.5, hard=True, generator=sampler.generator)
    cold = regard.gumbel_softmax(rows[:4000], 0.02, generator=sampler.generator)
    soft = regard.gumbel_softmax(rows, 1.0, generator=sampler.generator)
    w = regard.softmax(Z)
    leaf = rows[:2000].clone().requires_grad_()
    value = (regard.gumbel_softmax(leaf, 0.5, hard=True, generator=sampler.generator) * torch.arange(4.0)).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    labels = [f"{z:g}" for z in Z]
    series = {
        "softmax": (labels, w),
        "hard samples": (labels, hard.mean(0)),
        "mean soft, T = 1": (labels, soft.mean(0)),
    }
    return conclude(
        *(near(f"frequency of the sample {labels[i]}", float(w[i]), share(hard[:, i] == 1), 0.03) for i in range(4)),
        above("share of soft samples at T = 0.02 with a weight above 0.9", 0.9, share(cold.amax(-1) > 0.9)),
        above("mean |gradient| through the hard sample", 1e-3, gradient.abs().mean()),
        near("mean soft weight of the first score at T = 1 (softmax: 0.644)", 0.53, mean(soft[:, 0]), 0.03).ours(),
        remark="The argmax is an exact sample at every temperature. The soft sample is one only as T → 0: at T = 1 "
        "its mean is not softmax(z), so its gradient is biased.",
        alt="Frequencies of hard Gumbel samples match softmax; the mean of soft samples at T = 1 is flatter.",
        figure=Figure("bars", "score", "probability", series),
    )
