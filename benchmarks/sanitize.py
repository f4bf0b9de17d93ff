"""Every kernel once on small shapes under compute-sanitizer: bad accesses (memcheck) and races (racecheck).

    PYTHONPATH=. python3 benchmarks/sanitize.py             # both tools, one after the other; exit code 0 if clean
    PYTHONPATH=. python3 benchmarks/sanitize.py --calls     # the calls alone

torch's caching of memory is switched off, so that an access past a tensor is one past an allocation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

TOOLS = ("memcheck", "racecheck")


def calls() -> None:
    import torch

    from regard import normalizers, statistics
    from regard.kernels import attention, rows
    from regard.problem import Problem, Upstream

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    for name in ("softmax", "sigmoid", "softpick", "entmax15"):
        choice = normalizers.get(name)
        for count, n in ((5, 37), (3, 5001), (2, 20_000), (2, 40_001), (1, 140_003)):
            s, dp = draw(count, n), draw(count, n)
            p, state = rows.forward(s, choice)
            rows.backward(dp, p if choice.slope_of_weight is not None else s, state, choice)
        for m, n, d in ((130, 130, 64), (130, 200, 128), (2, 2100, 128)):
            for stats in ((), statistics.NAMES):
                q, k, v = draw(1, 4, m, d), draw(1, 2, n, d), draw(1, 2, n, d)
                problem = Problem(q, k, v, choice, d**-0.5, causal=m == n, stats=stats)
                answer = attention.forward(problem)
                attention.backward(problem, answer, Upstream(torch.randn_like(answer.o)))
    torch.cuda.synchronize()
    print("every call done")


def main() -> int:
    dirty = 0
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run([sys.executable, __file__, "--calls"], check=True)  # compiles, so that the tools only watch
    for tool in TOOLS:
        begin = time.perf_counter()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--calls"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        told = [line for line in done.stdout.splitlines() if "=========" in line]
        print(f"{tool}: exit code {done.returncode}, {time.perf_counter() - begin:.0f} s; {' '.join(told[-1:])}")
        if done.returncode:
            print("\n".join(told[:40]), done.stderr[-2000:])
            dirty = 1
    return dirty


if __name__ == "__main__":
    if "--calls" in sys.argv:
        calls()
    else:
        raise SystemExit(main())
