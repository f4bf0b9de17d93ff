"""Fenchel–Young losses of softmax, sparsemax and entmax, fused; z-loss and an entropy penalty.

    L(z, y) = Ω*(z) − z_y,   Ω*(z) = max_{p ∈ Δ} p·z + H_α(p),   ∂L/∂z = normaliser(z) − e_y

Reductions are those of the package `entmax`. No weights are stored: forward reads the logits once and keeps
three numbers per row, backward reads them once and writes the gradient.

>>> import regard, torch
>>> logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]], requires_grad=True)
>>> loss = regard.losses.FenchelYoungLoss("entmax15")(logits, torch.tensor([0, 1]))
>>> loss.backward()
>>> logits.grad[0]  # far enough ahead of the others: nothing to learn
tensor([0., 0., 0.])
"""

from __future__ import annotations

from torch import Tensor, nn

from regard import normalizers
from regard._core.rows.functions import softmax
from regard._core.rows.losses import (
    check_choice,
    check_coefficient,
    check_ignore_index,
    check_logits,
    check_reduction,
    fenchel_young,
    potential,
    reduce_losses,
)

__all__ = ["FenchelYoungLoss", "entropy_penalty", "fenchel_young_loss", "z_loss"]


def fenchel_young_loss(
    logits: Tensor,
    target: Tensor,
    normalizer: str | normalizers.Choice = "softmax",
    *,
    ignore_index: int = -100,
    reduction: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Ω*(z) − z_y, whose gradient is normaliser(z) − e_y.

    >>> import regard, torch
    >>> logits, target = torch.tensor([[0.0, 0.5, -2.0]]), torch.tensor([0])
    >>> regard.losses.fenchel_young_loss(logits, target, "entmax(alpha=1.5)")
    tensor([0.6844])

    Args:
        logits: (…, classes); float32, bfloat16, float16 or float64, summed in float32 (float64 for float64).
        target: class indices (…), integers. On a CPU an index that is no class is refused; on a GPU, which is not
            waited for, it makes the loss and the gradient of its row NaN.
        normalizer: softmax, sparsemax, entmax15 or "entmax(alpha=1.25)"; or `normalizers.get("entmax", alpha=tensor)`
            with a tensor (…, 1), which receives a gradient and takes the dense reference. entmax below α = 1.1 is
            computed in float64, above 2 by the dense reference.
        ignore_index: rows with this target have loss 0 and gradient 0, and do not count in the mean.
        reduction: "none", "sum", or "mean" over the rows that are not ignored, which `entmax` calls
            "elementwise_mean".
        backend: "cpu", "triton" or "reference"; None chooses by device.

    Returns:
        The losses (…) or their sum or mean, in float32 (float64 for float64 logits), also under autocast. NaN for rows
        that hold NaN or +inf, or nothing but −inf.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: The normaliser has no such loss, a shape does not fit, or an index is no class.
    """
    return fenchel_young(logits, target, normalizer, ignore_index, reduction, backend)


class FenchelYoungLoss(nn.Module):
    """The loss Ω*(z) − z_y of a normaliser as a module: `fenchel_young_loss` with its mean.

    >>> import regard, torch
    >>> criterion = regard.losses.FenchelYoungLoss("entmax(alpha=1.25)", ignore_index=0)
    >>> criterion(torch.zeros(2, 5, 10), torch.tensor([[1, 2, 3, 0, 0]] * 2))
    tensor(1.4005)

    Args:
        normalizer: as in `regard.losses.fenchel_young_loss`.
        ignore_index: as in `regard.losses.fenchel_young_loss`.
        reduction: "elementwise_mean" or "mean", "sum", "none".

    Raises:
        TypeError: `ignore_index` is no integer.
        ValueError: The normaliser has no such loss, or the reduction is unknown.
    """

    def __init__(
        self,
        normalizer: str | normalizers.Choice = "softmax",
        *,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__()
        self.choice = check_choice(normalizer)
        self.theta = self.choice.theta  # a parameter becomes the module's
        self.ignore_index = check_ignore_index(ignore_index)
        self.reduction = check_reduction(reduction)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of logits (…, classes) and class indices (…)."""
        return fenchel_young(logits, target, self.choice, self.ignore_index, self.reduction)

    def extra_repr(self) -> str:
        return f"{self.choice.spec!r}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"


def z_loss(logits: Tensor, coefficient: float = 1e-4, *, reduction: str = "mean") -> Tensor:
    """coefficient · (log Σ_j exp(z_j))²: keeps the normaliser of softmax near 1 (PaLM, arXiv 2204.02311).

    >>> import regard, torch
    >>> regard.losses.z_loss(torch.zeros(2, 10), 1.0)
    tensor(5.3019)

    Args:
        logits: (…, classes).
        coefficient: PaLM's is 1e-4.
        reduction: "mean" over all rows, "sum" or "none"; "none" lets padding be left out.

    Returns:
        The penalties (…) or their sum or mean, in float32 (float64 for float64 logits).

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: The logits have no classes, or the reduction is unknown.
    """
    coefficient, reduction = check_coefficient(coefficient), check_reduction(reduction)
    return _reduce_all(coefficient * potential(logits).square(), reduction)


def entropy_penalty(logits: Tensor, coefficient: float = 0.1, *, reduction: str = "mean") -> Tensor:
    """−coefficient · H(softmax(z)): penalises confident predictions (Pereyra et al. 2017, arXiv 1701.06548).

    A negative coefficient rewards confidence. It forms the weights, unlike the losses. For attention heads, add
    `stats.entropy` of `regard.attention(…, return_stats="entropy")` to the loss: it carries gradients.

    >>> import regard, torch
    >>> regard.losses.entropy_penalty(torch.zeros(2, 10), 1.0)
    tensor(-2.3026)

    Args:
        logits: (…, classes).
        coefficient: what the entropy is multiplied by.
        reduction: "mean" over all rows, "sum" or "none".

    Returns:
        The penalties (…) or their sum or mean, in float32 (float64 for float64 logits).

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: The logits have no classes, or the reduction is unknown.
    """
    coefficient, reduction = check_coefficient(coefficient), check_reduction(reduction)
    check_logits(logits)
    p, total = softmax(logits), potential(logits)
    surprise = (total[..., None] - logits).masked_fill(p == 0, 0.0)  # −log p
    return _reduce_all(-coefficient * (p * surprise).sum(-1), reduction)


def _reduce_all(penalties: Tensor, reduction: str) -> Tensor:
    return reduce_losses(penalties, penalties.new_ones(penalties.shape), reduction)
