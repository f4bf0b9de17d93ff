"""Seconds until the first forward and backward with all statistics are done: with no cache, and in the next process.

PYTHONPATH=. python3 benchmarks/h200_first_call.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

NAMES = ("softmax", "entmax15")


def both_processes() -> dict[str, dict[str, str]]:
    """Seconds by process and map, as text; what went wrong where something did."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for when in ("no cache", "next process"):
            found[when] = {}
            for name in NAMES:
                command = [sys.executable, __file__, name]
                environment = {**os.environ, "TRITON_CACHE_DIR": cache}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                found[when][name] = done.stdout.strip() if done.returncode == 0 else done.stderr[-80:]
    return found


def call(name: str) -> None:
    import torch

    import regard

    q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out, _ = regard.attention(q, k, v, is_causal=True, normalizer=name, return_stats=True)
    out.sum().backward()
    torch.cuda.synchronize()
    print(f"{time.perf_counter() - begin:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        call(sys.argv[1])
    else:
        print(both_processes())
