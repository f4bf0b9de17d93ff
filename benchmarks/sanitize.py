"""The kernels on small shapes under compute-sanitizer: bad accesses (memcheck) and races (racecheck).

    PYTHONPATH=. python3 benchmarks/sanitize.py               # exit code 0 if clean
    PYTHONPATH=. python3 benchmarks/sanitize.py --calls 0/1   # the calls alone; 1/3: every third, from the second on

torch's caching of memory is switched off, so that an access past a tensor is one past an allocation. Three processes
compile first, so that the tools watch kernels and not a compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

TOOLS = ("memcheck", "racecheck")


def cases() -> list[tuple]:
    """(normaliser, "rows", rows, columns) or (normaliser, "attention", queries, keys, width, all statistics?)."""
    found: list[tuple] = []
    for name in ("softmax", "softpick", "entmax15", "sigmoid"):
        for n in (256, 4096, 16384, 65536):
            found.append((name, "rows", 256, n))
    found += [
        (name, "attention", 1008, 1008, 128, every) for name in ("softmax", "entmax15") for every in (False, True)
    ]
    return [*found, ("softmax", "attention", 1, 8208, 128, True)]  # compiled as `h200.py` compiles them


def call(name: str, kind: str, *sizes) -> None:
    import torch

    from regard import normalizers, statistics
    from regard.kernels import attention, rows
    from regard.problem import Problem, Upstream

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    choice = normalizers.get(name)
    if kind == "rows":
        s, dp = draw(*sizes), draw(*sizes)
        p, state = rows.forward(s, choice)
        rows.backward(dp, p if choice.slope_of_weight is not None else s, state, choice)
    else:
        m, n, d, every = sizes
        q, k, v = draw(1, 2, m, d), draw(1, 2, n, d), draw(1, 2, n, d)
        problem = Problem(q, k, v, choice, d**-0.5, causal=m == n, stats=statistics.NAMES if every else ())
        answer = attention.forward(problem)
        if not every:
            attention.backward(problem, answer, Upstream(torch.randn_like(answer.o)))
    torch.cuda.synchronize()


def command(share: str) -> list[str]:
    return [sys.executable, __file__, "--calls", share]


def main() -> int:
    begin = time.perf_counter()
    for process in [subprocess.Popen(command(f"{part}/3")) for part in range(3)]:
        if process.wait():
            return 1
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    watching = {}
    for tool in TOOLS:
        watched = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command("0/1")]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        watching[tool] = subprocess.Popen(watched, env=environment, **pipes)
    dirty = 0
    for tool, process in watching.items():
        told = [line for line in process.communicate()[0].splitlines() if "=========" in line or "call" in line]
        print(
            f"{tool}: exit code {process.returncode} after {time.perf_counter() - begin:.0f} s; {' '.join(told[-2:])}"
        )
        if process.returncode:
            print("\n".join(told[:40]), flush=True)
            dirty = 1
    return dirty


if __name__ == "__main__":
    if "--calls" in sys.argv:
        part, parts = map(int, sys.argv[-1].split("/"))
        mine = cases()[part::parts]
        for case in mine:
            call(*case)
        print(f"{len(mine)} calls done")
    else:
        raise SystemExit(main())
