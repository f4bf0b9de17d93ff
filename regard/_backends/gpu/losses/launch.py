"""Launches the loss kernels: loss = Ω*(s) − s_y of every row of s [R, N], and ds = (p − e_y)·dl.

loss, state = forward(s, target, choice)      # s on a GPU, or on the CPU under TRITON_INTERPRET=1
ds = backward(dl, s, target, state, choice)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._backends.gpu import bundle
from regard._backends.gpu.launcher import launch, on_device_of, tensor_key
from regard._backends.gpu.losses import kernels
from regard._backends.gpu.rows.launch import TOLERANCE
from regard._backends.gpu.rows.plan import next_power_of_2
from regard._backends.gpu.rows.solver import Solver
from regard._facts import accumulator, has_packed_maximum
from regard.normalizers import Choice

LANES, HELD, PIECES = 2048, 8, 4  # lanes of a row, lanes of a thread, loads of a lane that are in flight at once
REGISTERS = 80  # limit per thread: three programs to an SM, so that one solves while others load
TILE = {2: 8192, 4: 4096, 8: 2048}  # numbers that a program of `backward` writes, by the bytes of one


def forward(s: Tensor, target: Tensor | None, choice: Choice, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(loss [R], state [3, R]) of s [R, N], contiguous; without a target the loss is Ω*(s). target: int64 [R]."""
    (R, N), F = s.shape, bundle.of(choice)
    loss = torch.empty(R, dtype=accumulator(s.dtype), device=s.device)
    state = torch.empty(3, R, dtype=loss.dtype, device=s.device)
    if R == 0:
        return loss, state
    lanes = min(max(next_power_of_2(N), 16), LANES)
    pieces = min(PIECES, -(-N // lanes))
    solver = Solver(F, TOLERANCE[s.dtype], AGAIN=False, HAS_MASK=False, PARTS=1)
    arguments = s, s if target is None else target, loss, state, R, N, ignore_index, _theta(choice)
    pairs = s.is_cuda and s.element_size() == 2 and has_packed_maximum(s.device)
    constants = F, lanes, pieces, target is not None, pairs and lanes == LANES, solver
    kernel = kernels.forward_threshold if F.family == "threshold" else kernels.forward_softmax
    options = {} if s.dtype == torch.float64 else {"maxnreg": REGISTERS}
    _launch(kernel, R, arguments, constants, num_warps=max(lanes // (32 * HELD), 1), **options)
    return loss, state


def backward(
    dl: Tensor, s: Tensor, target: Tensor | None, state: Tensor, choice: Choice, ignore_index: int = -100
) -> Tensor:
    """ds = (p − e_y)·dl [R, N], without a target p·dl; dl: [R]."""
    (R, N), F, ds = s.shape, bundle.of(choice), torch.empty_like(s)
    if R == 0:
        return ds
    most = TILE[s.element_size()]
    columns = min(max(next_power_of_2(N), 16), most)
    rows, parts = max(most // (4 * columns), 1), -(-N // columns)
    arguments = dl, s, s if target is None else target, state, ds, R, N, parts, ignore_index, _theta(choice)
    constants = F, rows, columns, target is not None
    warps = max(rows * columns * s.element_size() // 2048, 1)  # four loads of 16 bytes to a thread
    _launch(kernels.backward, -(-R // rows) * parts, arguments, constants, num_warps=warps)
    return ds


def _theta(choice: Choice) -> float:
    return 0.0 if choice.theta is None else float(choice.theta)


def _launch(kernel: Any, programs: int, arguments: tuple, constants: tuple, **options: Any) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    with on_device_of(tensors[0]):
        launch(tensor_key(*tensors), kernel, programs, arguments, constants, enable_fp_fusion=True, **options)
