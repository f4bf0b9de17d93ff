"""What a kernel earns: calls that it takes, timed with it and with the kernel that would take them otherwise, by turns.

    PYTHONPATH=. python3 benchmarks/h200_variants.py [PART OF A NAME …] [--json FILE]

A kernel stays in the library if it is at least 1.15 × faster than what would take its calls on a shape that a published
model has. Each variant is compiled by other processes first; then medians of `do_bench`, the two by turns.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from revision import find_revision

TURNS = 3
ROW_NUMBERS = 2**27  # of a tensor of rows
# batch, query heads, key heads, length, width
SHAPES = {
    "B4 H16 N4096 d128": (4, 16, 16, 4096, 128),
    "B1 H16 N16384 d128": (1, 16, 16, 16384, 128),
    "B4 H32 N4096 d64": (4, 32, 32, 4096, 64),
    "B2 H32/8 N8192 d128": (2, 32, 8, 8192, 128),
    "B8 H8 N512 d64": (8, 8, 8, 512, 64),
    "B16 H12 N1024 d64": (16, 12, 12, 1024, 64),
    "B8 H32 N512 d128": (8, 32, 32, 512, 128),
    "B1 H32 N16384 d64": (1, 32, 32, 16384, 64),
}


@contextmanager
def without(what: str) -> Iterator[None]:
    """The library without one of its kernels."""
    from regard._backends.gpu import bundle, tape
    from regard._backends.gpu.attention import registry
    from regard._backends.gpu.attention.backward import dkv
    from regard._backends.gpu.attention.hopper import launch as hopper
    from regard._backends.gpu.rows import plan

    tape._tapes.clear()
    plan.choose.cache_clear()
    first = what.partition(" ")[0]
    if first == "rows":
        kept = [tuple(k for k in table if k.name not in what.split()) for table in (plan.FORWARD, plan.BACKWARD)]
        patches = [patch.object(plan, "FORWARD", kept[0]), patch.object(plan, "BACKWARD", kept[1])]
    elif what == "fixed shift":
        patches = [patch.object(hopper, "MIN_FIXED_SHIFT_SCORES", 2**60)]
    elif what == "logistic":
        plain = lambda choice, of=bundle.of: of(choice)._replace(log_odds=None, cache_key="without")  # noqa: E731
        patches = [patch.object(bundle, "of", plain)]
    elif what == "relative in Hopper":
        refuse = lambda p, old=hopper.supports: "off" if p.relative is not None else old(p)  # noqa: E731
        back = lambda p, *rest, old=dkv.supports_hopper: "off" if p.relative is not None else old(p, *rest)  # noqa: E731
        patches = [patch.object(hopper, "supports", refuse), patch.object(dkv, "supports_hopper", back)]
    elif what in ("stored ds", "sparse", "sparse threshold"):
        kept = [tuple(k for k in table if k.name != what) for table in (registry.KERNELS, registry.BACKWARD_KERNELS)]
        patches = [patch.object(registry, "KERNELS", kept[0]), patch.object(registry, "BACKWARD_KERNELS", kept[1])]
    else:
        patches = []
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
        tape._tapes.clear()
        plan.choose.cache_clear()


def make_rows(name: str, direction: str, dtype: str, n: int) -> Callable:
    """A call on rows of n random normal scores."""
    import torch

    from regard import normalizers
    from regard._backends.gpu.rows import launch as rows

    choice = normalizers.get(name)
    s = torch.randn(ROW_NUMBERS // n, n, device="cuda", dtype=getattr(torch, dtype))
    if direction == "forward":
        return lambda: rows.forward(s, choice)
    p, state = rows.forward(s, choice)
    dp, saved = torch.randn_like(s), p if choice.slope_of_weight is not None else s
    return lambda: rows.backward(dp, saved, state, choice)


def make_attention(name: str, shape: str, causal: bool, direction: str, relative: bool, stats: tuple) -> Callable:
    """A call of the GPU backend on random normal bfloat16."""
    import torch

    from regard import normalizers
    from regard._backends.gpu.attention import launch
    from regard._call.problem import Problem, Upstream

    b, h, g, n, d = SHAPES[shape]
    q, k, v = (torch.randn(b, x, n, d, device="cuda", dtype=torch.bfloat16) for x in (h, g, g))
    table = torch.randn(h, 2 * n - 1, device="cuda") if relative else None
    choice = normalizers.get(name)
    p = Problem(q, k, v, choice, 1.0 / math.sqrt(d), causal=causal, relative=table, stats=stats)
    if direction == "forward":
        return lambda: launch.forward(p)
    found = launch.forward(p)
    upstream = Upstream(torch.randn_like(found.o), relative=relative)
    return lambda: launch.backward(p, found, upstream)


def list_cases() -> dict[str, tuple[str, Callable, tuple]]:
    """{label: (what is left out, maker, its arguments)}."""
    found: dict[str, tuple[str, Callable, tuple]] = {}

    def rows(what: str, name: str, dtype: str, lengths: tuple, direction: str = "forward") -> None:
        for n in lengths:
            found[f"{what}: {name} {dtype} n {n} {direction}"] = what, make_rows, (name, direction, dtype, n)

    rows("rows forward_pointwise", "sigmoid", "bfloat16", (32768, 65536, 128256))
    rows("rows forward_pointwise", "sigmoid", "float32", (65536,))

    def attention(what: str, name: str, shapes: tuple, causal: tuple, direction: str = "forward", **more) -> None:
        for shape in shapes:
            for c in causal:
                label = f"{what}: {name} {shape} {'causal' if c else 'full'} {direction}"
                options = more.get("relative", False), more.get("stats", ())
                found[label] = what, make_attention, (name, shape, c, direction, *options)

    long = ("B4 H16 N4096 d128", "B4 H32 N4096 d64")
    both = (True, False)
    attention("fixed shift", "softmax", (*long, "B2 H32/8 N8192 d128", "B1 H16 N16384 d128"), both)
    attention("fixed shift", "softpick", long, (True,))
    attention("logistic", "sigmoid", (*long, "B16 H12 N1024 d64"), both)
    attention(
        "relative in Hopper",
        "softmax",
        ("B8 H8 N512 d64", "B8 H32 N512 d128", "B16 H12 N1024 d64", *long),
        (False,),
        relative=True,
    )
    attention(
        "relative in Hopper", "softmax", ("B8 H32 N512 d128", "B4 H16 N4096 d128"), (False,), "backward", relative=True
    )
    attention("sparse", "entmax15", ("B1 H16 N16384 d128",), both, "backward")
    attention("stored ds", "sigmoid", ("B4 H16 N4096 d128",), both, "backward")
    return found


def compile_case(label: str) -> str:
    """Run a case with and without its kernel once; "" or what went wrong."""
    what, make, arguments = list_cases()[label]
    try:
        import torch

        for leave_out in ("", what):
            with without(leave_out):
                make(*arguments)()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def time_case(label: str) -> list[float]:
    """[ms with the kernel, ms without]."""
    from triton.testing import do_bench

    what, make, arguments = list_cases()[label]
    times: list[list[float]] = [[], []]
    for turn in range(TURNS):
        for place in (0, 1) if turn % 2 == 0 else (1, 0):
            with without(what if place else ""):
                call = make(*arguments)
                call(), call(), call()
                times[place].append(do_bench(call, warmup=10, rep=25, return_mode="median"))
    return [statistics.median(each) for each in times]


def main() -> None:
    import torch
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of labels; all without")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    labels = [x for x in list_cases() if not given.names or any(name in x for name in given.names)]
    with multiprocessing.get_context("spawn").Pool(min(14, len(labels))) as pool:
        wrong = dict(zip(labels, pool.map(compile_case, labels, chunksize=1), strict=True))
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{versions}, commit {find_revision()}\n\n| kernel: call | ms with | without | without ÷ with |")
    print("| --- | --- | --- | --- |")
    found = {}
    for label in labels:
        if wrong[label]:
            print(f"| {label} | {wrong[label]} | | |", flush=True)
            continue
        found[label] = time_case(label)
        with_it, alone = found[label]
        print(f"| {label} | {with_it:.3f} | {alone:.3f} | {alone / with_it:.2f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
