"""What a GPU of a ring does in a step: one pair of chunks, forward and backward, and its way to the host.

PYTHONPATH=. python3 benchmarks/parallel_pairs.py
"""

from __future__ import annotations

import torch
import triton

from regard import normalizers, statistics
from regard._backends.gpu.attention import partial as parts
from regard._call.problem import Problem, Upstream, Whole

HEADS, WIDTH = 16, 128


def timed(work) -> float:
    """Milliseconds, the median."""
    return triton.testing.do_bench(work, warmup=30, rep=120, return_mode="median")


def pair(n: int, groups: int, stats: tuple[str, ...] = ()) -> Problem:
    """n queries and the n keys before them: all of them seen."""
    q, k, v = (
        torch.randn(1, heads, n, WIDTH, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, groups, groups)
    )
    choice = normalizers.get("softmax")
    return Problem(q, k, v, choice, WIDTH**-0.5, stats=stats, first_query=n, causal=True, queries=2 * n)


def main() -> None:
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {torch.cuda.get_device_name()}\n")
    print("| chunk | key heads | pass | ms | TFLOP/s |\n| --- | --- | --- | --- | --- |")
    for n in (2048, 8192, 32768):
        flops = 4 * n * n * HEADS * WIDTH
        for groups in (HEADS, HEADS // 4):
            for name, stats in (("forward", ()), ("forward, all statistics", statistics.NAMES)):
                problem = pair(n, groups, stats)
                ms = timed(lambda: parts.forward(problem))
                print(f"| {n} | {groups} | {name} | {ms:.3f} | {flops / ms / 1e9:.0f} |", flush=True)
            problem = pair(n, groups)
            part = parts.forward(problem)
            whole = Whole(part.m, part.z, torch.zeros_like(part.m), o=part.o.to(problem.q.dtype))
            upstream = Upstream(torch.randn_like(problem.q))
            ms = timed(lambda: parts.backward(problem, whole, upstream))
            print(f"| {n} | {groups} | backward | {ms:.3f} | {2.5 * flops / ms / 1e9:.0f} |", flush=True)
    host = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    to, back = (
        timed(lambda: device.copy_(host, non_blocking=True)),
        timed(lambda: host.copy_(device, non_blocking=True)),
    )
    print(f"\nhost to device {host.numel() / to / 1e6:.1f} GB/s, back {host.numel() / back / 1e6:.1f} GB/s")


if __name__ == "__main__":
    main()
