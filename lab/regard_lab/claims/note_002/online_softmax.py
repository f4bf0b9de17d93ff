"""Online softmax: (m, ℓ) per block, of any size, if the block's term is summed."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap


def as_printed(blocks):
    """Return ℓ as the note prints it, ℓ_i = exp(m_{i−1} − m_i)·ℓ_{i−1} + exp(zⁱ − m_i), the last term a vector."""
    m, total = blocks[0].max(), torch.exp(blocks[0] - blocks[0].max())
    for block in blocks[1:]:
        new = torch.maximum(m, block.max())
        total = torch.exp(m - new) * total + torch.exp(block - new)
        m = new
    return total


@claim(
    statement="Keeping (m, ℓ) per block gives the global maximum and denominator; the blocks are equal in size, and "
    "ℓ_i is written without a sum inside the block.",
    derivation=[
        r"m_i = \max(m_{i-1}, \max z^i), \quad \ell_i = \sum_{j \le i} \sum_{x \in z^j} e^{x - m_i}",
        r"\ell_i = e^{m_{i-1} - m_i}\,\ell_{i-1} + \sum_{x \in z^i} e^{x - m_i}",
    ],
    rule="Core: m, ℓ and weights from blocks, equal or not, equal the whole row's. Beyond: the recursion as printed.",
)
def measure(sampler):
    z = 3.0 * sampler.normal(60).double()
    whole = regard.softmax(z)
    steps, online = [], regard.OnlineSoftmax()
    for block in z.split(6):
        steps.append(float(online.update(block).sum * torch.exp(online.max - z.max())))
    even = torch.cat([online.weights(block) for block in z.split(6)])
    ragged = regard.OnlineSoftmax()
    for block in z.split([1, 17, 2, 30, 10]):
        ragged.update(block)
    denominator = torch.exp(z - z.max()).sum()
    printed = (as_printed(z.split(6)) / denominator - 1.0).abs()
    series, whole_row = {"OnlineSoftmax": (range(1, 11), steps)}, {"denominator of the whole row": denominator}
    return conclude(
        below("largest |online − whole| weight, ten equal blocks", 1e-14, gap(even, whole)),
        below("|m − max z|, blocks of 1, 17, 2, 30, 10", 1e-300, gap(ragged.max, z.max())),
        below("relative error of ℓ, blocks of 1, 17, 2, 30, 10", 1e-14, gap(ragged.sum / denominator, 1)),
        below("relative error of ℓ, the block not summed (as printed)", 1e-3, printed.max()).beyond(),
        condition="the block's term is summed, ℓ_i = e^{m_{i−1}−m_i}·ℓ_{i−1} + Σ_j exp(zⁱ_j − m_i); equal blocks "
        "are not needed",
        alt="The running denominator grows block by block and ends at the whole row's.",
        figure=Figure("lines", "blocks seen", "ℓ so far, in units of e^(max z)", series, guides=whole_row),
    )
