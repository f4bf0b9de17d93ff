"""Plans of small calls without masks and biases: one block of all rows, whose geometry and kernels are found once.

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu.attention import small
>>> from regard._core.problem import Problem
>>> x = torch.tensor([[[[0.0], [1.0], [5.0]]]])
>>> attend = small.plan(Problem(x, x, x, normalizers.get("softmax"), 0.0, causal=True, stats=("entropy",)))
>>> o, stats = attend(x, x, x)
>>> o.flatten(), stats.flatten()
(tensor([0.0000, 0.5000, 2.0000]), tensor([0.0000, 0.6931, 1.0986]))
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention.blocks import Blocks
from regard._backends.cpu.attention.forward_rows import FIELDS
from regard._backends.cpu.attention.kernels import MAX_LANES, NO_SINK
from regard._backends.cpu.jit.compile import precision_of
from regard._core.problem import TENSORS, Problem
from regard.statistics import NAMES

NO_STATISTICS = torch.empty(0)


def plan(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return a function of q, k and v that gives o and the statistics, for problems that differ in these three alone.

    None if the problem is too large for one block, or has other tensors.
    """
    if any(getattr(problem, name) is not None for name in TENSORS[3:]):
        return None
    blocks, dtype, wide = Blocks(problem), problem.q.dtype, problem.accumulator
    if not blocks.is_small:
        return None
    ((task,),) = blocks.tasks
    (block,) = blocks.blocks_of(task)
    blocks.problem = problem.without_tensors()  # a plan keeps nothing of the user's alive
    normalizer, precision, names = problem.choice.normalizer, np.dtype(precision_of(wide)), problem.stats
    weigh = kernels.forward_kernel(normalizer, precision.name, names)
    theta, fields = np.array([problem.choice.theta or 0.0]), FIELDS if names else 0
    shape, column = (*block.size, problem.v.shape[-1]), (*block.size, 1)
    length = block.shape[2] + 2 * MAX_LANES

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.empty(block.shape, dtype=wide)
        blocks.compute_logits(block, blocks.rows_of(q, block), blocks.heads_of(k, task), s)
        inverse, state = np.empty(column, precision), np.empty((2, block.count), precision)
        sums, packed = np.empty((fields, block.count)), np.empty(length, precision)
        weigh(block.as_matrix(s), block.geometry, theta, NO_SINK, inverse.reshape(-1), state[0], state[1], sums, packed)
        product = torch.bmm(s, block.take_keys(blocks.heads_of(v, task))).view(shape)
        o = product * torch.from_numpy(inverse)
        o = o if dtype == wide else o.to(dtype)
        if not names:
            return o, NO_STATISTICS
        found, stats = np.empty((len(names), block.count)), torch.empty((len(names), *block.size), dtype=wide)
        finish, wanted = kernels.finish_kernel(normalizer, names)
        finish(sums, theta, NO_SINK, wanted, found, np.empty(len(NAMES)))
        block.row_output(stats)[...] = found
        return o, stats

    return attend
