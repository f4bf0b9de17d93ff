"""The whole table of attention, decoding and rows on the H200, in one run: right against float64, then timed.

    PYTHONPATH=. python3 benchmarks/h200.py [FOLDER] [--only attention decode rows]      # default benchmarks/results

Writes h200-attention.md, h200-decode.md, h200-rows.md and h200-roofline.png, each table as soon as it is there. Times
are medians of `triton.testing.do_bench` on random normal bf16 inputs; causal work counts half the square. Pools of
processes compile and check, then one process times alone. What failed its check is not timed, and named; LIMIT, in
the environment, bounds the checks (seconds). About five minutes with the compiled kernels at hand, seven without.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import h200_rows
import torch
import triton
from h200_cases import SHAPES, SIZES, Case, cases, check, problem, run_of
from h200_first_call import both_processes
from h200_rivals import Flex, bench, ceilings, torch_runs
from h200_roofline import draw, points
from h200_tables import (
    ALL,
    ORDER,
    decode_table,
    grid,
    lengths_table,
    others_table,
    softmax_table,
    some_table,
    sparse_table,
)

from regard._backends.gpu.attention import launch as attention
from regard._call.problem import Upstream

PARTS = ("attention", "decode", "rows")
TURNS = 5
BEGIN = time.perf_counter()


def say(what: str) -> None:
    print(f"{time.perf_counter() - BEGIN:5.0f} s  {what}", flush=True)


class Report:
    """A Markdown file that is written again with every section that comes."""

    def __init__(self, path: Path, title: str, told: str):
        self.path, self.lines = path, [f"# {title}", "", told, ""]

    def add(self, lines: list[str]) -> None:
        self.lines += lines
        self.path.write_text("\n".join(self.lines).rstrip() + "\n")
        say(f"{self.path.name}: {lines[0]}")


def checked(every: list[Case], limit: float) -> tuple[set[Case], str]:
    """The cases that are right, and a sentence about the others; what is not done in `limit` seconds is given up."""
    pool = ProcessPoolExecutor(14, mp_context=get_context("spawn"))
    futures = {case: pool.submit(check, case) for case in every}
    wait(futures.values(), timeout=limit)
    faults = {case: one.result() if one.done() else "no answer in time" for case, one in futures.items()}
    workers = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    right = {case for case, fault in faults.items() if not fault}
    wrong = [f"{case.told} ({fault})" for case, fault in faults.items() if fault]
    return right, (
        f"{len(right)} variants were right against float64 on fresh inputs before they were timed; wrong and not "
        f"timed: {'; '.join(wrong) or 'none'}."
    )


def timed(right: set[Case]) -> tuple[dict[Case, float], dict[tuple[str, str, bool], tuple[float, float]]]:
    """Our calls, and torch's (forward, backward) by (who, shape, causal), in ms.

    Those of one shape by turns, five times, each time in another order: the card's clock depends on the call before.
    """
    order = random.Random(0)
    ours, theirs = {}, {}
    for shape, sizes in SIZES.items():
        runs: dict = {case: run_of(case) for case in cases(PARTS) if case in right and case.shape == shape}
        if runs and shape in SHAPES:
            p = problem(sizes)
            runs |= torch_runs(p.q, p.k, p.v)
        turns: dict = {key: [] for key in runs}
        for _ in range(TURNS):
            for key in order.sample([*runs], len(runs)):
                turns[key].append(bench(runs[key]))
        found = {key: statistics.median(times) for key, times in turns.items()}
        ours |= {key: ms for key, ms in found.items() if isinstance(key, Case)}
        for who, causal, _ in found.keys() - ours.keys():
            theirs[who, shape, causal] = found[who, causal, False], found[who, causal, True]
        # a run that is cut off still tells these
        say(shape + ": " + ", ".join(f"{getattr(key, 'told', key)} {ms:.3f}" for key, ms in found.items()))
    return ours, theirs


def flex_table(flex: Flex, theirs) -> list[str]:
    """FlexAttention, which takes a while to compile, for one work."""
    shape, causal = flex.WORK
    rows = [[f"{who}, {shape} {ORDER[causal]}", f"{forward:.3f}", f"{backward:.3f}"] for who, (forward, backward) in (
        ("FlexAttention", flex.times()), ("cuDNN", theirs["cuDNN", shape, causal]),
    )]  # fmt: skip
    return ["## FlexAttention, ms, one work", "", *grid(["work", "forward", "backward"], rows)]


def long_table() -> list[str]:
    """N = 131072: memory beside inputs, outputs and gradients, forward and backward."""
    rows = []
    for name in ("softmax", "entmax15"):
        p = problem((1, 16, 16, 131072, 131072, 128), name, True, ALL if name == "softmax" else ())
        do = torch.randn_like(p.q)
        for _ in range(3):  # the first compiles, the second is recorded
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, began = torch.cuda.memory_allocated(), time.perf_counter()
            answer = attention.forward(p)
            grads = attention.backward(p, answer, Upstream(do))
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            outputs = (answer.o, answer.stats, grads.q, grads.k, grads.v)
            scratch = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in outputs)
            finite = all(bool(x.isfinite().all()) for x in outputs)
            del answer, grads, outputs
        rows.append([name, f"{scratch / 2**30:.3f}", f"{1000 * seconds:.0f}", "yes" if finite else "NO"])
    return ["## N = 131072, 16 heads of 128, causal, forward and backward (scratch: less than 2 GiB is asked)", "",
            *grid(["map", "scratch GiB", "ms", "all finite"], rows)]  # fmt: skip


def first_call_table() -> list[str]:
    times = both_processes()
    rows = [[name, *(times[when][name] for when in times)] for name in ("softmax", "entmax15")]
    return ["## First forward and backward with all statistics, seconds (less than 30 is asked)", "",
            *grid(["map", *times], rows)]  # fmt: skip


def equal_bits(right: set[Case]) -> list[str]:
    """Do three runs of the same call give the same bits, with torch's deterministic algorithms?"""
    same, differ = 0, []
    torch.use_deterministic_algorithms(True)  # else the backward of softmax is cuDNN's
    for case in sorted(case for case in right if case.shape == "d 128, N 4096" and case.causal):
        run = run_of(case)
        first, *others = (vars(run()) for _ in range(3))
        tensors = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
        if all(torch.equal(first[name], other[name]) for name in tensors for other in others):
            same += 1
        else:
            differ.append(case.told)
    torch.use_deterministic_algorithms(False)
    return [
        "## Equal bits",
        "",
        f"Three runs of {same + len(differ)} calls under `torch.use_deterministic_algorithms(True)`: {same} equal to "
        f"the bit; not equal: {', '.join(differ) or 'none'}.",
        "",
    ]


def machine(command: str) -> str:
    return (
        f"Command: `PYTHONPATH=. python3 benchmarks/{command}`, commit {os.environ['COMMIT']}, one run on one "
        f"{torch.cuda.get_device_name()}: torch {torch.__version__}, Triton {triton.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; medians of `triton.testing.do_bench`."
    )


def main(folder: Path, parts: list[str]) -> None:
    started = h200_rows.start() if "rows" in parts else None
    flex = Flex() if "attention" in parts else None
    right, told = checked(cases(parts), float(os.environ.get("LIMIT", "150")))
    say(told)
    rows_ready = h200_rows.collect(started) if started else None
    copy, read, product = ceilings()
    told = (
        f"{machine('h200.py')} Random normal bf16. Ceilings in this run: copy {copy:.2f} TB/s, read {read:.2f} TB/s, "
        f"bf16 product {product:.0f} TFLOP/s. {told}"
    )
    say("checked; timing")
    ours, theirs = timed(right)
    if "decode" in parts:
        Report(folder / "h200-decode.md", "Few queries over many keys on the H200", told).add(decode_table(ours, copy))
    if "attention" in parts:
        report = Report(folder / "h200-attention.md", "Attention on the H200", told)
        report.add(softmax_table(ours, theirs))
        report.add(some_table(ours, theirs))
        report.add(others_table(ours))
        report.add(sparse_table(ours, theirs))
        report.add(lengths_table(ours))
        report.add(flex_table(flex, theirs))
        draw(folder / "h200-roofline.png", copy, product, points(ours, theirs))
        report.add(["## Roofline", "", "![roofline](h200-roofline.png)", ""])
        report.add(equal_bits(right))
        report.add(long_table())
    if rows_ready:
        rows = Report(
            folder / "h200-rows.md", "Rows on the H200", f"{machine('h200.py --only rows')} {h200_rows.ABOUT}"
        )
        for section in h200_rows.sections(*rows_ready):
            rows.add(section)
    if "attention" in parts:
        report.add(first_call_table())
    say("done")


if __name__ == "__main__":
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    os.environ.setdefault("COMMIT", revision or "unknown")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    main(options.folder, options.only)
