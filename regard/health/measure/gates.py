"""Sums over an output gate σ(g), per head: how many numbers, their sum, how many are near 0."""

import torch
from torch import Tensor

NEAR_ZERO = 0.05  # a gate below it lets almost nothing through


def gates_of_heads(gates: Tensor, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Returns σ(g) as [B, H, M, 1 or E] of a call with outputs [B, H, M, E]; None if it does not fit.

    A model may hold it as its output is laid out: (B, M, H·E), (B, M, H), (B, M, H, …) or (B, H, M, …).

    >>> import torch
    >>> from regard.health.measure.gates import gates_of_heads
    >>> gates_of_heads(torch.zeros(2, 5, 12), (2, 3, 5, 4)).shape
    torch.Size([2, 3, 5, 4])
    """
    batch, heads, queries, width = shape
    if tuple(gates.shape) in ((batch, queries, heads), (batch, queries, heads * width)):
        gates = gates.unflatten(-1, (heads, -1))
    elif tuple(gates.shape) == (batch, heads, queries):
        return gates[..., None]
    if gates.ndim != 4 or gates.shape[-1] not in (1, width):
        return None
    if gates.shape[:3] == (batch, heads, queries):
        return gates
    return gates.transpose(1, 2) if gates.shape[:3] == (batch, queries, heads) else None


def gate_sums(gates: Tensor, rows: Tensor | None) -> Tensor:
    """Returns [3, H]: the number of gates [B, H, M, …] in the rows [B, M] that count, their sum, those near 0."""
    gates = gates.detach().double()
    counts = torch.ones_like(gates) if rows is None else rows[:, None, :, None].expand(gates.shape).double()
    return torch.stack([x.sum((0, 2, 3)) for x in (counts, counts * gates, counts * (gates < NEAR_ZERO))])
