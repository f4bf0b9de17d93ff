"""The kernels on small shapes under compute-sanitizer: bad accesses (memcheck) and races (racecheck).

    PYTHONPATH=. python3 benchmarks/sanitize.py [KIND …]      # rows, attention …; 0 if clean
    PYTHONPATH=. python3 benchmarks/sanitize.py --calls 0 2    # every second call, without the tool

torch's caching of memory is switched off, so that an access past a tensor is one past an allocation. Every call runs
once without the tool first, so that it watches kernels and not a compiler; then two processes per tool share the calls.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from unittest.mock import patch

TOOLS = ("memcheck", "racecheck")
SHARES = 2
KINDS = ["rows", "attention", "lists", "fixed shift", "stored"]


def cases() -> list[tuple]:
    """(normaliser, "rows", dtype, rows, columns) or (normaliser, "attention", queries, keys, width, statistics?).

    "lists" is "attention" with lists at any length, forward and backward; in "fixed shift" rows outgrow it; in "stored"
    ds is stored at any length.
    """
    found: list[tuple] = []
    for name in ("softmax", "softpick", "entmax15", "sigmoid"):
        for dtype in ("float32", "bfloat16"):
            found += [(name, "rows", dtype, 24, n) for n in (250, 4099)]
    found += [(name, "rows", "float32", 300, 16384) for name in ("softmax", "entmax15")]
    found += [(name, "attention", 300, 300, 128, every) for name in ("softmax", "entmax15") for every in (False, True)]
    found += [("softmax", "attention", 272, 272, 64, False), ("sigmoid", "attention", 130, 257, 64, True)]
    found += [("entmax15", "lists", 600, 600, 128, False), ("sparsemax", "lists", 300, 700, 64, True)]
    found += [("softmax", "attention", 600, 600, 64, True), ("softmax", "attention", 300, 700, 128, True)]
    found += [("sigmoid", "attention", 300, 300, 64, False), ("softmax", "fixed shift", 300, 300, 64, False)]
    found += [("softpick", "fixed shift", 300, 333, 128, False)]
    found += [("softmax", "stored", 300, 300, 128, False), ("softpick", "stored", 200, 333, 128, False)]
    found += [("entmax15", "stored", 300, 300, 128, False), ("softmax", "stored", 204, 333, 128, False)]
    return [*found, ("softmax", "attention", 1, 2080, 128, True)]


def call(name: str, kind: str, *sizes) -> None:
    import torch

    from regard import normalizers, statistics
    from regard._backends.gpu.attention import launch as attention
    from regard._backends.gpu.attention.backward import dkv, stored_ds
    from regard._backends.gpu.attention.hopper import launch as hopper
    from regard._backends.gpu.attention.sparse import launch as sparse
    from regard._backends.gpu.rows import launch as rows
    from regard._call.problem import Problem, Upstream

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda").to(dtype)

    choice = normalizers.get(name)
    if kind == "rows":
        dtype = getattr(torch, sizes[0])
        s, dp = draw(*sizes[1:], dtype=dtype), draw(*sizes[1:], dtype=dtype)
        s[1] = -float("inf")
        p, state = rows.forward(s, choice)
        rows.backward(dp, p if choice.slope_of_weight is not None else s, state, choice)
    else:
        m, n, d, every = sizes
        q, k, v = draw(1, 2, m, d), draw(1, 2, n, d), draw(1, 2, n, d)
        problem = Problem(q, k, v, choice, d**-0.5, causal=m == n, stats=statistics.NAMES if every else ())
        with contextlib.ExitStack() as small:
            if kind == "lists":
                lengths = dict.fromkeys(sparse.LENGTHS, range(256, 2**31))
                small.enter_context(patch.object(sparse, "LENGTHS", lengths))
            if kind == "fixed shift":
                small.enter_context(patch.object(hopper, "MIN_FIXED_SHIFT_SCORES", 0))
                k[:, :, 3] *= 60.0
            if kind == "stored":
                small.enter_context(patch.multiple(stored_ds, SHORT=64, FILL=0))
                small.enter_context(patch.object(dkv, "SHORT", 64))
            answer = attention.forward(problem)
            if not every or kind == "lists":
                attention.backward(problem, answer, Upstream(torch.randn_like(answer.o)))
    torch.cuda.synchronize()


def run(kinds: list[str], share: int, shares: int) -> None:
    for case in (mine := [case for case in cases() if case[1] in kinds][share::shares]):
        begin = time.perf_counter()
        call(*case)
        print(f"done {case} in {time.perf_counter() - begin:.1f} s", flush=True)
    print(f"{len(mine)} calls done")


def main(kinds: list[str]) -> int:
    def command(share: int, shares: int) -> list[str]:
        return [sys.executable, __file__, *kinds, "--calls", str(share), str(shares)]

    begin = time.perf_counter()
    compiling = 6
    for process in [subprocess.Popen(command(share, compiling)) for share in range(compiling)]:
        if process.wait():
            return 1
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    watching = {}
    for tool in TOOLS:
        for share in range(SHARES):
            watched = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command(share, SHARES)]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            watching[f"{tool} {share + 1}/{SHARES}"] = subprocess.Popen(watched, env=environment, **pipes)
    dirty = 0
    for what, process in watching.items():
        told = [line for line in process.communicate()[0].splitlines() if "=========" in line or "done" in line]
        seconds = time.perf_counter() - begin
        print(f"{what}: exit code {process.returncode} after {seconds:.0f} s; {' '.join(told[-2:])}", flush=True)
        if process.returncode:
            print("\n".join(told[:40]), flush=True)
            dirty = 1
    return dirty


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of calls: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--calls", nargs=2, type=int, metavar=("SHARE", "SHARES"), help="run these, without the tool")
    options = parser.parse_args()
    kinds = options.kinds or KINDS
    raise SystemExit(run(kinds, *options.calls) if options.calls else main(kinds))
