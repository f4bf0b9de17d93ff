"""The table of attention kernels, in order of preference, and the choice among them.

`python -m regard._backends.gpu.attention.registry` writes docs/developers/kernels-table.md from these tables.
That a call is torch's forward is decided before, in `_core/dispatch.py`; that it takes cuDNN's, in
`_core/cudnn_forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from regard._backends.gpu.attention.backward import cudnn, dq, stored_ds
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.forward import decode
from regard._backends.gpu.attention.forward import launch as forward
from regard._backends.gpu.attention.hopper import launch as hopper
from regard._backends.gpu.attention.masks import dense as dense_mask
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._call.problem import Problem

FEW_SCORES = 2**19
NARROW = 64  # heads beside whose scores a bias by relative position is not worth Hopper's table of it
PAGE = Path(__file__).parents[4] / "docs" / "developers" / "kernels-table.md"


class Kernel(NamedTuple):
    """A kernel: of `KERNELS`, on a `Problem` and the `Forward` to fill; of `BACKWARD_KERNELS`, on a `BackwardCall`."""

    name: str
    summary: str  # how it works
    families: tuple[str, ...]  # of the normalisers that it computes
    limits: str  # what `supports` asks for beside the family, in words
    supports: Callable[[Any], str | None]  # None, or why it cannot take the call
    run: Callable[..., None]
    needs_delta: bool = False  # backward: δ of every row is computed beforehand


def _supports_hopper(problem: Problem) -> str | None:
    """Say why the Hopper kernel cannot take a call, or should not: its statistics take three launches, `online` one."""
    if reason := hopper.supports(problem):
        return reason
    if problem.stats and math.prod(problem.q.shape[:3]) * problem.k.shape[2] < FEW_SCORES:
        return f"statistics of fewer than {FEW_SCORES:,} scores"
    if problem.relative is not None and not problem.stats and problem.q.shape[-1] <= NARROW:
        return f"a bias by relative position without statistics, heads of at most {NARROW}"
    return None


def _support_all(call: Problem | BackwardCall) -> None:
    return None


KERNELS = (
    Kernel(
        name="decode",
        summary="programs share the keys of a row",
        families=("ratio", "pointwise"),
        limits=f"at most {decode.QUERIES} queries, at least {decode.KEYS} keys; no mask, bias per key or "
        "position, or dropout",
        supports=decode.supports,
        run=forward.run_decode,
    ),
    Kernel(
        name="hopper",
        summary="Gluon warpgroups",
        families=("ratio", "pointwise"),
        limits="Hopper; bfloat16, float16; heads of multiples of 8 up to 256, values no wider than keys; at least 64 "
        "queries; statistics of softmax and softmax1 only; no dense mask, parameter per row, dropout or score function "
        "but a soft cap; of biases one per key (bfloat16) or, with statistics or heads of more than "
        f"{NARROW}, one by relative position, of softmax and softmax1 without a soft cap",
        supports=_supports_hopper,
        run=forward.run_hopper,
    ),
    Kernel(
        name="sparse threshold",
        summary="one Gluon sweep lists the keys that may have weight",
        families=("threshold",),
        limits=f"Hopper; bfloat16, float16; heads of multiples of 8 up to {sparse.WIDEST}; at least "
        f"{sparse.LEAST_KEYS['forward']} visible keys "
        f"({sparse.LEAST_KEYS['forward of powers or intervals']} of intervals and of entmax with another alpha than "
        "1.5 or 2); no score function but a soft cap, no dense mask or dropout; of biases one per key, without a soft "
        "cap",
        supports=lambda problem: sparse.supports(problem, "forward"),
        run=partial(forward.run_threshold, with_lists=True),
    ),
    Kernel(
        name="threshold",
        summary="sweeps over the keys until tau is found",
        families=("threshold",),
        limits="none",
        supports=_support_all,
        run=forward.run_threshold,
    ),
    Kernel(
        name="online",
        summary="one sweep over the keys",
        families=("ratio", "pointwise"),
        limits="none",
        supports=_support_all,
        run=forward.run_online,
    ),
)
BACKWARD_KERNELS = (
    Kernel(
        name="cudnn",
        summary="cuDNN's backward from our row state",
        families=("ratio",),
        limits=f"Hopper; bfloat16, float16; softmax; head widths of 8·n up to {cudnn.WIDEST}; of the options causal "
        "order and scale only; no gradient of statistics; no deterministic algorithms",
        supports=cudnn.supports,
        run=cudnn.run,
    ),
    Kernel(
        name="stored ds",
        summary="dk and dv (Gluon on Hopper) leave ds in scratch, dq is one product",
        families=("ratio", "pointwise"),
        limits=f"bfloat16, float16; heads of {stored_ds.WIDTHS.start} to {stored_ds.WIDTHS[-1]}; at least "
        f"{stored_ds.SHORT} queries and keys; no dense mask, bias, dropout, score function but a soft cap, or gradient "
        "of temperature or parameter; windows, intervals and a bias per key or by relative position of softmax and "
        "softmax1 on Hopper, heads of 128",
        supports=stored_ds.supports,
        run=stored_ds.backward,
        needs_delta=True,
    ),
    Kernel(
        name="sparse",
        summary="Gluon sweeps list the keys above tau, then the queries",
        families=("threshold",),
        limits=f"as sparse threshold; at least {sparse.LEAST_KEYS['backward']} visible keys "
        f"({sparse.LEAST_KEYS['wide backward']} with heads of more than 128); no soft cap, bias, interval or gradient "
        "of statistics or temperature",
        supports=dq.supports_sparse,
        run=partial(dq.run_two_sweeps, with_lists=True),
    ),
    Kernel(
        name="two sweeps",
        summary="dq over the keys, then dk and dv (Gluon on Hopper) over the queries",
        families=("ratio", "pointwise", "threshold"),
        limits="none",
        supports=_support_all,
        run=dq.run_two_sweeps,
    ),
)


def choose(problem: Problem) -> Kernel:
    """Return the first kernel that supports the problem."""
    return next(kernel for kernel in _of_family(KERNELS, problem) if kernel.supports(problem) is None)


def choose_backward(call: BackwardCall) -> Kernel:
    """Return the first backward kernel that supports the call."""
    return next(kernel for kernel in _of_family(BACKWARD_KERNELS, call.problem) if kernel.supports(call) is None)


def choose_bare(problem: Problem) -> Problem | None:
    """Return a masked problem in terms of intervals if another kernel takes it then, else None."""
    bare = dense_mask.replace_mask(problem)
    return None if bare is None or choose(bare) is choose(problem) else bare


def choose_bare_backward(call: BackwardCall) -> Problem | None:
    """Return a call's masked problem in terms of intervals if another backward kernel takes it then, else None."""
    bare = dense_mask.replace_mask(call.problem)
    same = bare is None or choose_backward(call._replace(problem=bare)) is choose_backward(call)
    return None if same else bare


def _of_family(kernels: tuple[Kernel, ...], problem: Problem) -> Iterator[Kernel]:
    return (kernel for kernel in kernels if problem.choice.family in kernel.families)


def explain(problem: Problem) -> list[tuple[str, str]]:
    """List (kernel, why it was passed over) of the normaliser's kernels before the one that `choose` returns."""
    passed = []
    for kernel in _of_family(KERNELS, problem):
        reason = kernel.supports(problem)
        if reason is None:
            break
        passed.append((kernel.name, reason))
    return passed


def describe(problem: Problem) -> str:
    """Name the kernel of a problem and why faster ones were passed over, in one line.

    For example "online: one sweep over the keys (not hopper: a soft cap)".
    """
    kernel, bare = choose(problem), choose_bare(problem)
    passed = "; ".join(f"not {name}: {reason}" for name, reason in explain(problem))
    described = f"{kernel.name}: {kernel.summary}" + (f" ({passed})" if passed else "")
    if bare is None:
        return described
    faster, form = choose(bare), "hides no key between two visible ones" if bare.key_lengths is None else "is a length"
    return f"{faster.name}: {faster.summary}, if the mask {form}, else {described}"


def table() -> list[tuple[str, ...]]:
    """List (direction, kernel, how it works, families, limits) of every kernel, in order of preference."""
    return [
        (direction, kernel.name, kernel.summary, ", ".join(kernel.families), kernel.limits)
        for direction, kernels in (("forward", KERNELS), ("backward", BACKWARD_KERNELS))
        for kernel in kernels
    ]


def render() -> str:
    """Return the page of the table, in Markdown."""
    lines = [
        "# Attention kernels on a GPU",
        "",
        "A call takes the first kernel of its direction that supports it. Written by",
        "`python -m regard._backends.gpu.attention.registry` from `KERNELS` and `BACKWARD_KERNELS` there; do not edit.",
        "",
        f"A dense mask of at least {dense_mask.LEAST_SCORES:,} scores that hides no key between two visible ones takes",
        "the kernel of intervals, of threshold maps that of key lengths. Both kernels are launched; one ends at once.",
        "",
        "| direction | kernel | how it works | families | limits |",
        "| --- | --- | --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in table()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
