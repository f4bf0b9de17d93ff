"""Attention over a part of the keys on the CPU: what `regard.parallel` computes on each rank before parts are merged.

Blocks, products and row kernels are those of `launch.py`; `regard._call.problem` says what `Part` and `Whole` hold.
Threshold maps and statistics need whole rows (`regard.parallel.gather`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention.blocks import Block
from regard._backends.cpu.attention.launch import compute_forward, compute_gradients, detach_problem
from regard._backends.cpu.jit.compile import precision_of
from regard._call.problem import Gradients, Part, Problem, Upstream, Whole
from regard.normalizers._families import nothing
from regard.normalizers._language import speak, torch_words


def forward(problem: Problem) -> Part:
    """The part of a ratio or pointwise normaliser, before rest and sink."""
    problem = detach_problem(problem)
    o, m, z, _ = compute_forward(problem, problem.accumulator)
    rest = getattr(problem.choice.normalizer, "rest", nothing)
    if rest is not nothing:  # it joins once, when all parts are there
        own = z - speak(rest, torch_words)(torch.exp(-m))
        o, z = o * torch.where(own > 0, z / own, 0.0)[..., None], own
    return Part(o, m, z)


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    """The gradients of a part, from what is known of its whole rows."""
    problem = detach_problem(problem)
    wide, theta = problem.accumulator, problem.choice.theta or 0.0
    state = [x.to(wide) for x in (whole.m, whole.z, whole.delta)]
    ds_dot_s = torch.zeros(problem.q.shape[:3], dtype=wide)
    run = kernels.part_kernel(problem.choice.normalizer, precision_of(wide))

    def rows(block: Block, s: Tensor, dp: Tensor) -> None:
        found = block.row_output(ds_dot_s)
        arrays = *(block.row_array(x) for x in state), found
        run(block.as_matrix(s), block.as_matrix(dp), block.geometry, theta, *arrays)
        block.store_rows(ds_dot_s, found)

    gradients = compute_gradients(problem, upstream, rows, wide)
    if upstream.temperature:
        gradients.temperature = -ds_dot_s / problem.temperature
    return gradients
