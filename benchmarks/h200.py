"""The whole table of attention and rows on the H200, in one run: each variant right against float64, then timed.

    PYTHONPATH=. python3 benchmarks/h200.py [FOLDER]        # default benchmarks/results; about two minutes

Writes h200-attention.md, h200-rows.md and h200-roofline.png. Times are medians of `triton.testing.do_bench` on random
normal bf16 inputs; causal work counts half the square. A pool of processes compiles and checks, then one process times
alone. What failed its check is not timed, and named; LIMIT (seconds) bounds the checks of attention.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import h200_rows
import torch
import triton
from h200_cases import DECODE, SHAPES, Case, cases, check, flops, problem, run_of
from h200_rivals import bench, ceilings, flex, torch_backend
from h200_roofline import Point, draw
from h200_tables import ALL, ORDER, decode_table, grid, lengths_table, others_table, softmax_table, sparse_table

from regard.kernels import attention
from regard.problem import Upstream


def checked(limit: float) -> tuple[set[Case], list[str]]:
    """The cases that are right, and what is wrong with the others; what is not done in `limit` seconds is given up."""
    every = cases()
    pool = ProcessPoolExecutor(14, mp_context=get_context("spawn"))
    futures = {case: pool.submit(check, case) for case in every}
    wait(futures.values(), timeout=limit)
    faults = {case: one.result() if one.done() else "no answer in time" for case, one in futures.items()}
    workers = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    wrong = [f"{case.shape} {case.name} {ORDER[case.causal]}: {fault}" for case, fault in faults.items() if fault]
    return {case for case, fault in faults.items() if not fault}, wrong


def timed(right: set[Case]) -> dict[Case, float]:
    found = {}
    for case in cases():
        if case in right:
            found[case] = bench(run_of(case))
    return found


def rivals() -> dict[tuple[str, str, bool], tuple[float, float]]:
    """(forward, backward) ms by (who, shape, causal)."""
    found = {}
    for shape, sizes in SHAPES.items():
        for causal in (True, False):
            p = problem(sizes)
            for name in ("cuDNN", "flash"):
                found[name, shape, causal] = torch_backend(name, p.q, p.k, p.v, causal)
    return found


def flex_table(theirs) -> list[str]:
    """FlexAttention, which takes a while to compile, for one work."""
    shape = "d 128, N 4096"
    p = problem(SHAPES[shape])
    rows = [[f"{who}, {shape} causal", f"{forward:.3f}", f"{backward:.3f}"] for who, (forward, backward) in (
        ("FlexAttention", flex(p.q, p.k, p.v, True)), ("cuDNN", theirs["cuDNN", shape, True]),
    )]  # fmt: skip
    return ["## FlexAttention, ms", "", *grid(["work", "forward", "backward"], rows)]


def long_table() -> list[str]:
    """N = 131072: memory beside inputs, outputs and gradients, forward and backward."""
    rows = []
    for name in ("softmax", "entmax15"):
        p = problem((1, 16, 16, 131072, 131072, 128), name, True, ALL if name == "softmax" else ())
        do = torch.randn_like(p.q)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin.record()
        answer = attention.forward(p)
        grads = attention.backward(p, answer, Upstream(do))
        end.record()
        torch.cuda.synchronize()
        kept = sum(x.nbytes for x in (answer.o, answer.stats, grads.q, grads.k, grads.v))
        scratch = torch.cuda.max_memory_allocated() - before - kept
        rows.append([name, f"{scratch / 2**30:.3f}", f"{begin.elapsed_time(end):.0f}"])
        del p, do, answer, grads
    return ["## N = 131072, 16 heads of 128, causal, forward and backward once", "",
            *grid(["map", "scratch GiB", "ms (first call)"], rows)]  # fmt: skip


def first_call_table() -> list[str]:
    """Seconds of the first forward and backward with statistics: no cache, then the next process."""
    times = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        for when in ("no cache", "next process"):
            command = [sys.executable, str(Path(__file__).parent / "h200_first_call.py")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            times[when] = done.stdout.split() if done.returncode == 0 else [done.stderr[-80:]] * 2
    rows = [[name, times["no cache"][i], times["next process"][i]] for i, name in enumerate(("softmax", "entmax15"))]
    return ["## First forward and backward with all statistics, seconds", "", *grid(["map", *times], rows)]


def equal_bits(right: set[Case]) -> list[str]:
    """Do three runs of the same call give the same bits?"""
    same, differ = 0, []
    for case in (case for case in right if case.shape == "d 128, N 4096" and case.causal):
        run = run_of(case)
        first, *others = (vars(run()) for _ in range(3))
        tensors = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
        if all(torch.equal(first[name], other[name]) for name in tensors for other in others):
            same += 1
        else:
            differ.append(f"{case.name}{' backward' if case.backward else ''}")
    return [f"Three runs of {same + len(differ)} calls: {same} equal to the bit, {differ or 'none'} not.", ""]


def points(ours, theirs) -> list[Point]:
    found = []
    for shape in ("d 128, N 16384", "d 64, N 16384"):
        b, h, _, n, _, d = SHAPES[shape]
        for label, case, products, tensors in (
            ("softmax", Case(shape, "softmax", True, ()), 2, 4),
            ("softmax, 14 statistics", Case(shape, "softmax", True, ALL), 2, 4),
            ("softmax backward", Case(shape, "softmax", True, (), True), 5, 8),
            ("entmax15", Case(shape, "entmax15", True, ()), 2, 4),
        ):
            work = flops(shape, True, products)
            intensity = work / (tensors * 2 * b * h * n * d)
            if case in ours:
                found.append(Point(f"{label}, d {d}", intensity, work / ours[case] / 1e9, "ours"))
            if label.startswith("softmax") and "14" not in label:
                ms = theirs["cuDNN", shape, True][products == 5]
                found.append(Point(f"cuDNN {label}, d {d}", intensity, work / ms / 1e9, "torch"))
    for shape in DECODE:
        case = Case(shape, "softmax", False, ALL)
        b, _, g, _, n, d = DECODE[shape]
        if case in ours:
            work = flops(shape, False, 2)
            found.append(Point(shape, work / (4 * b * g * n * d), work / ours[case] / 1e9, "ours"))
    return found


def main(folder: Path) -> None:
    right, wrong = checked(float(os.environ.get("LIMIT", "600")))
    copy, read, product = ceilings()
    theirs, ours = rivals(), timed(right)
    draw(folder / "h200-roofline.png", copy, product, points(ours, theirs))
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}"
    lines = [
        "# Attention on the H200",
        "",
        f"Command: `PYTHONPATH=. python3 benchmarks/h200.py`, commit {os.environ['COMMIT']}, one run on one "
        f"{torch.cuda.get_device_name()}: {versions}; random normal bf16, medians of `triton.testing.do_bench`. "
        f"Ceilings in this run: copy {copy:.2f} TB/s, read {read:.2f} TB/s, bf16 product {product:.0f} TFLOP/s. "
        f"{len(right)} variants were right against float64 on fresh inputs before they were timed; wrong and not "
        f"timed: {'; '.join(wrong) or 'none'}.",
        "",
        "![roofline](h200-roofline.png)",
        "",
    ]
    for table in (
        lambda: softmax_table(ours, theirs),
        lambda: others_table(ours),
        lambda: sparse_table(ours, theirs),
        lambda: decode_table(ours, copy),
        lambda: lengths_table(ours),
        lambda: equal_bits(right),
        long_table,
        first_call_table,
        lambda: flex_table(theirs),
    ):  # written as they come: a run that is cut short leaves what it had
        lines += table()
        (folder / "h200-attention.md").write_text("\n".join(lines))
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    os.environ.setdefault("COMMIT", told or "unknown")
    results = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results")
    h200_rows.main([str(results / "h200-rows.md")])
    main(results)
