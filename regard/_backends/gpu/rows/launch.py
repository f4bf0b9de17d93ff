"""Launches the row kernels: p = normaliser(scale·s) for every row of s [R, N], and its backward.

    p, state = forward(s, choice)                 # s on a GPU, or on the CPU under TRITON_INTERPRET=1
    ds = backward(dp, p, state, choice)

Which kernel, and how a row is cut, is the table in `plan.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from regard._backends.gpu import bundle, tape
from regard._backends.gpu.launcher import launch, on_device_of
from regard._backends.gpu.rows.plan import Cut, RowKernel, Rows, choose, next_power_of_2
from regard._backends.gpu.rows.traits import probe_traits
from regard._facts import accumulator, sm_count
from regard.normalizers import Choice

SMALL = 2**24  # numbers: beyond that a kernel runs longer than the host takes to launch it
# |Σp − 1| at which the threshold solver stops, before the weights are divided by Σp
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 1e-4, torch.float16: 1e-4}


def forward(
    s: Tensor, choice: Choice, theta: Tensor | None = None, mask: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """p = normaliser(scale·s), and the row state [2, R] (shift and z, as `problem.Forward` says).

    s: [R, N], contiguous. theta: the normaliser's parameter per row [R], or None for choice.theta.
    mask: bool [R, N] of any strides, True = visible. scale: > 0; for s below float64 within 1e±30.
    """

    if not s.is_cuda or s.numel() > SMALL:
        return _forward(s, choice, theta, mask, scale)
    with on_device_of(s):
        inputs = (s, theta, mask)
        key = "rows", choice, scale, tape.key_of(inputs)
        return tape.run(key, inputs, lambda: _forward(s, choice, theta, mask, scale))


def _forward(
    s: Tensor, choice: Choice, theta: Tensor | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    p = torch.empty_like(s)
    if s.numel() == 0:
        return p, torch.zeros(2, len(s), dtype=accumulator(s.dtype), device=s.device)
    state = _empty_state(s)
    _Launch("forward", s, (s, p, state), choice, theta, mask, scale).run()
    return p, state


def _empty_state(s: Tensor) -> Tensor:
    return torch.empty(2, s.numel() // s.shape[-1], dtype=accumulator(s.dtype), device=s.device)


def plan(like: Tensor, choice: Choice, scale: float) -> Callable[[Tensor], Tensor]:
    """Return a function s ↦ normaliser(scale·s) for tensors s [..., N] of the shape, strides and dtype of `like`."""
    if not like.is_cuda or like.numel() > SMALL:
        return lambda s: _forward(s.contiguous(), choice, None, None, scale)[0]
    kind = object()

    def normalize(s: Tensor) -> Tensor:
        s = s.contiguous()

        def compute() -> tuple[Tensor]:
            p = torch.empty_like(s)
            _Launch("forward", s, (s, p, _empty_state(s)), choice, None, None, scale).run()  # nobody reads the state
            return (p,)

        with on_device_of(s):
            return tape.run((kind, s.data_ptr() % 16 == 0), (s,), compute)[0]

    return normalize


def backward(
    dp: Tensor,
    saved: Tensor,
    state: Tensor,
    choice: Choice,
    theta: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """ds = scale·(a·dp − b·δ) [R, N]. saved is p where the choice has a slope_of_weight, else s."""

    def compute() -> tuple[Tensor]:
        ds = torch.empty_like(saved)
        if dp.numel() > 0:
            direction = "from weights" if choice.slope_of_weight is not None else "from scores"
            _Launch(direction, saved, (dp, saved, ds, state), choice, theta, mask, scale).run()
        return (ds,)

    if not dp.is_cuda or dp.numel() > SMALL:
        return compute()[0]
    with on_device_of(dp):
        inputs = (dp, saved, state, theta, mask)
        return tape.run(("rows backward", choice, scale, tape.key_of(inputs)), inputs, compute)[0]


class _Launch:
    """One call's arguments, and the kernel and launch numbers that the plan chooses for it."""

    def __init__(
        self, direction: str, s: Tensor, tensors: tuple[Tensor, ...], choice: Choice,
        theta: Tensor | None, mask: Tensor | None, scale: float,
    ) -> None:  # fmt: skip
        if not s.is_cuda and not knobs.runtime.interpret:
            raise ValueError(f"backend 'triton' needs tensors on a CUDA device (or TRITON_INTERPRET=1), got {s.device}")
        self.F = F = bundle.of(choice)
        self.s, self.tensors, self.theta, self.mask = s, tensors, theta, mask
        self.traits = probe_traits(choice.normalizer)
        theta_number = 0.0 if choice.theta is None or theta is not None else float(choice.theta)
        self.numbers = float(scale), theta_number
        kind = "proportional" if getattr(choice.normalizer, "proportional", False) else F.family
        processors = sm_count(s.device) if s.is_cuda else 0
        kind = "softmax" if F.exponential else kind
        self.shape = s.numel() // s.shape[-1], s.shape[-1]
        self.rows = Rows(direction, kind, *self.shape, s.element_size(), processors)

    def run(self) -> None:
        kernel, cut = choose(self.rows)
        function = getattr(importlib.import_module(f"regard._backends.gpu.rows.{kernel.module}"), kernel.name)
        with on_device_of(self.s):
            self._run_tiles(function, kernel, cut)

    def _run_tiles(self, function: Any, kernel: RowKernel, cut: Cut) -> None:
        from regard._backends.gpu.rows.solver import Solver

        (R, N), s, F = self.shape, self.s, self.F
        vector = min(16 // self.rows.size, cut.columns)
        groups = cut.groups(vector, F.order) if F.family == "threshold" else 0
        parts = next_power_of_2(cut.parts)
        solver = Solver(F, TOLERANCE[s.dtype], cut.again, self.mask is not None, parts)
        constants = dict(
            F=F, ROWS=cut.rows, COLUMNS=cut.columns, PARTS=parts, HAS_MASK=self.mask is not None,
            HAS_THETA=self.theta is not None, TRAITS=self.traits, AGAIN=cut.again, AHEAD=cut.ahead, STEP=cut.step,
            LANES=cut.lanes, VECTOR=vector, GROUPS=groups, SCALED=self.numbers[0] != 1.0, C=solver,
        )  # fmt: skip
        options = {"num_warps": cut.warps, "enable_fp_fusion": True}
        if cut.registers is not None:
            options["maxnreg"] = cut.registers
        mask = s if self.mask is None else self.mask.view(torch.uint8)
        strides = (0, 0) if self.mask is None else self.mask.stride()
        theta_rows = s if self.theta is None else self.theta.contiguous()
        partial = counters = s
        stages: tuple[str, ...] = ("whole",)
        if cut.parts > 1:
            count = kernel.published + (groups if kernel.name == "forward_threshold" else 0)
            partial = torch.empty(R * (count * cut.parts + 4), dtype=accumulator(s.dtype), device=s.device)
            counters = torch.zeros(R, dtype=torch.int32, device=s.device) if cut.meets else s
            stages = ("meet",) if cut.meets else ("publish", "finish")
            if F.family == "pointwise" and self.rows.direction != "forward":
                stages = ("finish",)  # no sums
        for stage in stages:
            _start(
                function, -(-R // cut.rows) * cut.parts, constants | {"STAGE": stage}, options,
                *self.tensors, mask, theta_rows, partial, counters, R, N, cut.parts, *strides, *self.numbers,
            )  # fmt: skip
            if stage == "publish" and kernel.name == "forward_threshold":
                from regard._backends.gpu.rows.threshold import solve_rows

                _start(
                    solve_rows, R, constants, options,
                    s, mask, theta_rows, partial, R, N, cut.parts, *strides, *self.numbers,
                )  # fmt: skip


def _start(function: Any, programs: int, constants: dict[str, Any], options: dict[str, Any], *arguments: Any) -> None:
    """Start a kernel with those of the constants that it takes, which are its last parameters."""
    taken = tuple(constants[name] for name in function.arg_names[len(arguments) :])
    launch(None, function, programs, arguments, taken, **options)
