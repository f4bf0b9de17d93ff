"""p = normaliser(scale·s) for every row of s [R, N], and its backward, as Triton kernels.

A row that fits is held in registers by one program. A longer one is shared by several programs that meet once (ratio)
or once per step (threshold) and so still read it once; where too many would have to meet, two launches read it twice.

    p, state = forward(s, choice)                 # s on a GPU, or on the CPU under TRITON_INTERPRET=1
    ds = backward(dp, p, state, choice)
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._backends.gpu import bundle
from regard._backends.gpu.rows.resident import launch as rows_launch
from regard._backends.gpu.rows.traits import traits_of
from regard._core.device import sm_count
from regard.normalizers import Choice

try:
    from triton import next_power_of_2
    from triton.runtime import JITFunction

    from regard._backends.gpu.rows import (
        exact as rows_exact,
    )
    from regard._backends.gpu.rows import (
        fast_exact,
        threshold_short,
    )
    from regard._backends.gpu.rows import (
        long as rows_long,
    )
    from regard._backends.gpu.rows import (
        online as rows_online,
    )
    from regard._backends.gpu.rows import (
        pointwise as rows_pointwise,
    )
    from regard._backends.gpu.rows import (
        threshold as rows_threshold,
    )

    COMPILED = isinstance(rows_exact.forward_exact, JITFunction)  # and not interpreted
except ImportError:  # bundle.of says what is missing, when a kernel is asked for
    pass

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """The tile of a program, how many programs share a row, and whether they can wait for one another."""

    rows: int
    columns: int
    parts: int
    warps: int
    meets: bool
    registers: int | None = None  # a thread's most, so that several programs share a multiprocessor
    again: bool = False  # the tile is read again from the cache rather than held
    step: int = 0  # columns that a program takes at a time, where it writes them as it reads
    lanes: int = 0  # columns of a row that its lanes hold side by side, where one warp solves several rows
    ahead: int = 0  # how many programs later the tile comes that a program calls into the L2 cache
    pieces: int = 0  # in how many it takes a row whose threads each have a shift of their own

    def groups(self, vector: int, order: int) -> int:
        """How many maxima of a part say enough of it: one per thread, of all parts together about 512; 0 for a short
        row, where they would cost as much as the row; more where a row costs most, and its support is large."""
        if self.columns <= 512 and self.parts == 1:
            return 0
        if self.columns == 65536 and order == 2:
            return 2048
        return min(self.columns // vector, 32 * self.warps, max(512 // next_power_of_2(self.parts), 16))

    def rereads(self, vector: int, order: int) -> str:
        """What a solver's step reads again: of the longest float32 rows half, where two sums leave registers for it."""
        if self.again and self.columns == 65536 and vector == 4 and order == 1:
            return "half"
        return "all" if self.again else "none"


def plan(R: int, N: int, tensors: int, size: int, family: str, processors: int) -> Plan:
    """The launch for R rows of N columns of `size` bytes a number, by what was fastest on an H200.

    tensors: 1 forward; 2 backward, from the weights; 3 backward from the scores, which computes most.
    family: the normaliser's; or of a ratio "exponential" if u = exp(s), "proportional" if u is to the scores.
    """
    columns = max(next_power_of_2(N), 16)
    half, forwards = size == 2, tensors == 1
    solves = forwards and family == "threshold"
    exact = forwards and family == "exponential" and size == 4
    if (solves or exact) and columns <= 1024:
        threads, vector = max(columns // 32, 1), 16 // size
        return Plan(min(32 // threads, next_power_of_2(R)), columns, 1, 1, False, lanes=threads * vector)
    if columns <= 4096 and not exact:
        many = 1024 if tensors == 3 and columns < 1024 else 2048
        return _whole(1 if solves else max(1, min(many // columns, next_power_of_2(R))), columns, tensors, family, half)
    few = processors > 2 * R  # then a long row is shared, so that every multiprocessor has work
    if exact:
        return _exact(N, columns, few, processors)
    longest = min((131072 if forwards else 65536) // size, 32768)
    if size < 8 and (solves or (forwards and half and family != "pointwise")):
        longest = 65536
    if forwards and family == "pointwise" and columns > (16384 if half else longest) and not few:
        return Plan(1, columns, 1, 8, False, 40 if half else 32, step=4096 if half else 2048)
    if columns <= longest and not (few and columns > 8192):
        whole = _whole(1, columns, tensors, family, half)
        held = forwards and half and family in ("ratio", "proportional") and columns == 32768  # fills a multiprocessor
        return whole._replace(ahead=processors) if held else whole
    columns, warps, registers, again = 8192, 8, 80 if tensors == 2 else 64, False
    if tensors == 3:
        warps, again = (8, True) if half else (16, False)
    elif solves:
        registers = None
    elif forwards and half and family != "pointwise" and not few:
        columns, warps, again = 32768, 16, True
    elif forwards and family == "ratio":
        warps = 16
    parts, step = -(-N // columns), 4096 if forwards and family == "pointwise" else 0
    # programs of an unfinished row hold their places: at most an eighth, so that other streams cannot starve them
    return Plan(1, columns, parts, warps, parts <= processors // 8, registers, again, step)


def _exact(N: int, columns: int, few: bool, processors: int) -> Plan:
    """float32 softmax: many rows the quick way; else by float64 exponentials, which take two registers each: one or two
    programs fill a multiprocessor, and the tiles of those that follow wait in the L2 cache."""
    if columns in (8192, 16384) and not few:
        return Plan(1, columns, 1, columns // 1024, False, 64, step=2048)
    if columns <= 8192:
        return Plan(1, columns, 1, columns // 1024, False, 128, ahead=16384 // columns * processors)
    parts = -(-N // 8192)
    return Plan(1, 8192, parts, 8, parts <= processors // 8, 128, ahead=2 * processors)


def _whole(rows: int, columns: int, tensors: int, family: str, half: bool) -> Plan:
    """One program has its rows to itself. A thread holds 32 numbers: loads enough in flight, no spills.

    16 where it computes much with them, 64 where waiting for other warps, or holding what is read again, costs more.
    """
    total = rows * columns
    if tensors == 1 and family == "threshold":
        again = half or columns in (16384, 65536)
        registers = 64 if again and columns > 16384 else None
        return Plan(rows, columns, 1, min(max(total // 2048, 1), 32), False, registers, again)
    if tensors == 3:
        held = 32 if half and columns >= 1024 else 16
        return Plan(rows, columns, 1, min(max(total // (32 * held), 1), 32), False, 64, half)
    if tensors == 1 and half and columns == 65536 and family in ("exponential", "proportional"):
        return Plan(rows, columns, 1, 32, False, 64, pieces=4)
    if tensors == 1 and half and columns == 32768 and family == "exponential":
        return Plan(rows, columns, 1, 16, False, 64, True)
    registers = 64 if tensors == 1 and columns >= 8192 else None
    return Plan(rows, columns, 1, min(max(total // 1024, 1), 32), False, registers, columns == 65536)


def forward(
    s: Tensor, choice: Choice, theta: Tensor | None = None, mask: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """p = normaliser(scale·s), and the row state [2, R] (shift and z, as `problem.Forward` says).

    s: [R, N], contiguous. theta: the normaliser's parameter per row [R], or None for choice.theta.
    mask: bool [R, N] of any strides, True = visible. scale: > 0.
    """
    F = _check(s, choice)
    p = torch.empty_like(s)
    state = torch.empty(2, len(s), dtype=_accumulator(s), device=s.device)
    if s.numel() == 0:
        return p, state.zero_()
    launch = _Launch(F, s, 1, theta, mask, scale, choice)
    if theta is None and rows_launch.takes(s, launch.family, mask, launch.traits.faint):
        rows_launch.forward(s, p, state, F, launch.traits, scale, launch.numbers[1], _TOLERANCE[s.dtype])
        return p, state
    plan, tensors, traits = launch.plan, (s, p, state), dict(TRAITS=launch.traits)
    vector = min(16 // s.element_size(), plan.columns)
    if launch.exact and plan.step and not launch.traits.faint:
        tile = dict(LANES=32 * plan.warps, VECTOR=vector, STEP=plan.step, SCALED=scale != 1.0)
        launch(fast_exact.forward_quick, tensors, 0, tile)
    elif launch.exact:
        lanes = dict(LANES=plan.lanes or plan.columns)
        tile = dict(ROWS=plan.rows, AHEAD=plan.ahead, FAINT=launch.traits.faint)
        launch(rows_exact.forward_exact, tensors, 3, lanes | tile)
    elif plan.lanes:
        tile = dict(ROWS=plan.rows, LANES=plan.lanes, TOLERANCE=_TOLERANCE[s.dtype])
        launch(threshold_short.forward_short, tensors, 0, tile)
    elif plan.pieces:
        tile = dict(LANES=32 * plan.warps, VECTOR=vector, PIECES=plan.pieces)
        launch(rows_long.forward_long, tensors, 2, tile | traits)
    elif plan.step:
        launch(rows_pointwise.forward_pointwise, tensors, 2, dict(STEP=plan.step) | traits)
    elif F.family == "threshold":
        groups = plan.groups(vector, F.order)
        solver = dict(GROUPS=groups, VECTOR=vector, TOLERANCE=_TOLERANCE[s.dtype])
        tile = dict(ROWS=plan.rows, AGAIN=plan.rereads(vector, F.order))
        launch(rows_threshold.forward_threshold, tensors, groups + 6, tile, solver=solver)
    else:
        tile = dict(ROWS=plan.rows, AGAIN=plan.again, AHEAD=plan.ahead)
        launch(rows_online.forward_online, tensors, 2, tile | traits)
    return p, state


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
    F = _check(dp, choice)
    ds = torch.empty_like(saved)
    if dp.numel() == 0:
        return ds
    launch = _Launch(F, saved, 2 if F.slope_of_weight is not None else 3, theta, mask, scale, choice)
    if theta is None and rows_launch.takes_back(dp, saved, F, launch.family, mask, launch.traits.faint):
        rows_launch.backward(dp, saved, ds, state, F, launch.traits, scale, launch.numbers[1])
        return ds
    tensors, tile = (dp, saved, ds, state), dict(ROWS=launch.plan.rows, AGAIN=launch.plan.again)
    if F.family == "threshold":
        launch(rows_threshold.backward_threshold, tensors, 2, tile)
    elif launch.exact and F.slope_of_weight is not None:
        launch(rows_exact.backward_exact, tensors, 2, dict(ROWS=launch.plan.rows))
    else:
        launch(rows_online.backward_online, tensors, 1, tile | dict(TRAITS=launch.traits), sums=F.family == "ratio")
    return ds


# |Σp − 1| at which the solver stops, before the weights are divided by Σp
_TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 1e-4, torch.float16: 1e-4}


def _accumulator(s: Tensor) -> torch.dtype:
    return torch.float64 if s.dtype == torch.float64 else torch.float32


def _check(s: Tensor, choice: Choice) -> Any:
    F = bundle.of(choice)
    if s.dtype not in DTYPES or s.dim() != 2 or not s.is_contiguous():
        raise TypeError(
            f"s must be a contiguous float tensor [R, N], got {s.dtype} of shape {tuple(s.shape)}; use .float()"
        )
    if not s.is_cuda and COMPILED:
        raise ValueError(f"s must be on a CUDA device, got {s.device}; set TRITON_INTERPRET=1 to interpret the kernels")
    return F


class _Launch:
    """One problem's arguments and plan; called, it runs a kernel in as many launches as the plan takes."""

    def __init__(self, F, s, tensors, theta, mask, scale, choice):
        self.F, self.s = F, s
        self.R, self.N = s.shape
        self.traits = traits_of(choice.normalizer, scale < 1e-30)
        processors = sm_count(s.device) if s.is_cuda else 0
        kinds = {"exponential": F.exponential, "proportional": self.traits.proportional}
        family = self.family = next((kind for kind, holds in kinds.items() if holds), F.family)
        self.exact = bool(F.exponential) and s.dtype == torch.float32
        self.plan = plan(self.R, self.N, tensors, s.element_size(), family, processors)
        if s.element_size() == 8:
            self.plan = self.plan._replace(registers=None)  # a number takes two
        self.theta_rows = s if theta is None else theta.contiguous()
        self.mask = s if mask is None else mask.view(torch.uint8)
        self.strides = (0, 0) if mask is None else mask.stride()
        theta_number = 0.0 if choice.theta is None or theta is not None else float(choice.theta)
        self.numbers = float(scale), theta_number
        self.flags = {"HAS_MASK": mask is not None, "HAS_THETA": theta is not None}

    def __call__(self, kernel, tensors, count, tile, solver=None, sums=True):
        """count: numbers that a part publishes. tile: the kernel's own constants. solver: those of `solve_rows` too."""
        rows, columns, parts, warps, meets, registers, *_ = self.plan
        R, N, s = self.R, self.N, self.s
        if parts == 1:
            stages = ("whole",)
        elif not sums:
            stages = ("finish",)
        else:
            stages = ("meet",) if meets else ("publish", "finish")
        accumulator = _accumulator(s)
        partial = counters = s
        if parts > 1:
            partial = torch.empty(R * (count * parts + 4), dtype=accumulator, device=s.device)
            counters = torch.zeros(R, dtype=torch.int32, device=s.device) if meets else s
        shape = {"PARTS": next_power_of_2(parts), **self.flags}
        options = {"num_warps": warps, "enable_fp_fusion": True}
        if registers is not None:
            options["maxnreg"] = registers
        grid = (-(-R // rows) * parts,)
        with torch.cuda.device(s.device) if s.is_cuda else contextlib.nullcontext():
            for stage in stages:
                kernel[grid](
                    *tensors, self.mask, self.theta_rows, partial, counters, R, N, parts, *self.strides, *self.numbers,
                    F=self.F, COLUMNS=columns, **tile, **(solver or {}), **shape, STAGE=stage, **options,
                )  # fmt: skip
                if solver and stage == "publish":
                    rows_threshold.solve_rows[(R,)](
                        s, self.mask, self.theta_rows, partial, R, N, parts, *self.strides, *self.numbers,
                        F=self.F, COLUMNS=columns, **shape, **solver, **options,
                    )  # fmt: skip
