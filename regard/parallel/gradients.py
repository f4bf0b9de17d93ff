"""`RowGradients` and `KeyGradients`: sums of the gradients of pairs of chunks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._call.problem import Gradients, Problem, Upstream, Whole


class RowGradients:
    """dq, dtemperature [B, H, M], and dbias in the bias's shape before it was expanded."""

    def __init__(self, rows: Problem, upstream: Upstream) -> None:
        like = dict(dtype=rows.accumulator, device=rows.q.device)
        self.q = torch.zeros(rows.q.shape, **like)
        self.temperature = torch.zeros(rows.q.shape[:3], **like) if upstream.temperature else None
        self.bias = None
        if upstream.bias:
            sizes = zip(rows.bias.shape, rows.bias.stride(), strict=True)
            self.bias = torch.zeros([1 if stride == 0 else size for size, stride in sizes], **like)

    def add(self, grads: Gradients, here: slice, columns: slice) -> None:
        """Add a pair's gradients: `here` are its rows, `columns` its columns of the bias."""
        self.q[:, :, here] += grads.q
        if self.temperature is not None:
            self.temperature[:, :, here] += grads.temperature
        if self.bias is not None:
            target = self.bias if self.bias.shape[2] == 1 else self.bias[:, :, here]
            target = target if target.shape[3] == 1 else target[..., columns]
            target += grads.bias.sum_to_size(target.shape)


class KeyGradients:
    """dk and dv of one rank's keys, in the accumulator's dtype: two views of one tensor, which is sent."""

    def __init__(self, problem: Problem, k: Tensor | None = None, v: Tensor | None = None) -> None:
        k, v = (problem.k, problem.v) if k is None else (k, v)
        self.flat = torch.zeros(k.numel() + v.numel(), dtype=problem.accumulator, device=k.device)
        self.k, self.v = self.flat[: k.numel()].view(k.shape), self.flat[k.numel() :].view(v.shape)

    def add(self, grads: Gradients, there: slice) -> None:
        """Add the gradients of the keys `there`."""
        self.k[:, :, there] += grads.k
        self.v[:, :, there] += grads.v


def slice_rows(whole: Whole, here: slice) -> Whole:
    """Return the state of the rows `here`."""
    return Whole(*(x[:, :, here] for x in (whole.m, whole.z, whole.delta, whole.o)))


def slice_upstream(upstream: Upstream, here: slice) -> Upstream:
    """Return the upstream gradients of the rows `here`, contiguous, as GPU kernels take them."""
    stats = {name: x[:, :, here].contiguous() for name, x in upstream.stats.items()}
    return replace(upstream, o=upstream.o[:, :, here].contiguous(), stats=stats)
