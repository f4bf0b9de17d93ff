"""What a backward kernel receives, and the terms that gradients of statistics add to it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.config import is_linear
from regard._backends.gpu.attention.masks.dense import PackedMask
from regard._backends.gpu.launcher import launch_key
from regard._call.problem import Forward, Gradients, Problem, Upstream


class BackwardCall(NamedTuple):
    """One backward call: its inputs, the state of its rows, and the gradients to fill."""

    problem: Problem
    forward: Forward
    do: torch.Tensor
    rows: State
    grads: Gradients  # dq, dk, dv and, where it is wanted, that of the temperature
    flags: dict[str, Any]  # of `config_of`
    packed: PackedMask | None = None  # the mask, where it has been packed
    wants_relative: bool = False  # the gradient of the bias by relative position is to be filled too

    @property
    def key(self) -> Hashable:
        """The launch key of kernels that read forward's results."""
        return launch_key(self.problem, self.do, self.forward.o, self.forward.shift, self.forward.z)


def add_statistic_terms(call: BackwardCall, upstream: Upstream) -> BackwardCall:
    """Return the call with what the statistics' gradients add to ds: p·(β·log2 e) + γ·y + ε and a part of δ, per row.

    ds += g_lse·p − g_H·p̄·(log p̄ + H) + 2·g_var·(s − mean)/n, with log p̄ = ln 2·log2 e − log(Z·mass), s = a·y.
    """
    p, forward, delta = call.problem, call.forward, call.rows.delta
    stats = dict(zip(p.stats, forward.stats, strict=True))
    zero = torch.zeros_like(delta)
    beta, gamma, epsilon = zero, zero, zero
    if "logsumexp" in upstream.stats:
        delta -= upstream.stats["logsumexp"]
    if "entropy" in upstream.stats:
        mass = stats["mass"]
        alive = (mass > 0) & (forward.z > 0)
        d_entropy = torch.where(alive, upstream.stats["entropy"] / torch.where(alive, mass, 1.0), 0.0)
        delta += d_entropy * (stats["entropy"] - torch.log(torch.where(alive, forward.z * mass, 1.0)))
        beta = (d_entropy * -math.log(2.0)).contiguous()
    if "logit_variance" in upstream.stats:
        n = stats["visible_keys"]
        d_variance = torch.where(n > 0, 2.0 * upstream.stats["logit_variance"] / n.clamp_min(1.0), 0.0)
        a = p.scale if is_linear(p) else 1.0
        a = a if p.temperature is None else a / p.temperature.to(delta.dtype)
        gamma, epsilon = (d_variance * a).contiguous(), (-d_variance * stats["mean_logit"]).contiguous()
    return call._replace(rows=call.rows._replace(beta=beta, gamma=gamma, epsilon=epsilon))
