"""Where the host's time of a call goes: µs per call without the device's, and the functions that take them.

PYTHONPATH=. python3 benchmarks/h200_host.py [--functions 12]
"""

from __future__ import annotations

import argparse
import cProfile
import io
import math
import pstats
import time
from collections.abc import Callable


def make_calls() -> dict[str, Callable]:
    """Calls whose kernels are short."""
    import torch

    import regard

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = (draw(1, 8, 128, 64) for _ in range(3))  # three tensors: one given twice has no tape
    big = [draw(1, 8, 2048, 64) for _ in range(3)]
    many = [draw(4, 12, 1024, 64) for _ in range(3)]
    one = draw(1, 32, 1, 128), draw(1, 8, 4096, 128), draw(1, 8, 4096, 128)
    padded = torch.ones(4, 1, 1024, 1024, device="cuda", dtype=torch.bool).tril()
    mask = torch.ones(1, 1, 2048, 2048, device="cuda", dtype=torch.bool).tril()
    row = torch.ones(1, 1, 1, 4096, device="cuda", dtype=torch.bool)
    sink, lengths = torch.randn(8, device="cuda"), torch.tensor([2000], device="cuda")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    call = regard.attention
    two = dict(return_stats=("entropy", "max_logit"))
    return {
        "sdpa": lambda: sdpa(q, k, v),
        "plain": lambda: call(q, k, v),
        "two statistics": lambda: call(q, k, v, **two),
        "all statistics": lambda: call(q, k, v, return_stats=True),
        "entmax15": lambda: call(q, k, v, normalizer="entmax15"),
        "two statistics, N 2048": lambda: call(*big, **two),
        "bool mask": lambda: call(*big, mask),
        "bool mask, our kernels": lambda: call(*many, padded, backend="triton"),
        "sink and window": lambda: call(*big, is_causal=True, window=(128, 0), sink=sink),
        "key lengths": lambda: call(*big, key_lengths=lengths),
        "decode": lambda: call(*one, enable_gqa=True),
        "decode, two statistics": lambda: call(*one, enable_gqa=True, **two),
        "decode, bool mask": lambda: call(*one, row, enable_gqa=True),
    }


def time_host(run: Callable, count: int = 60) -> float:
    """Microseconds of the host per call: few calls at a time, so that the device's queue never fills."""
    import torch

    best = math.inf
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, (time.perf_counter() - start) / count * 1e6)
    return best


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=0, help="that the profile of each call names")
    functions = parser.parse_args().functions
    with torch.no_grad():
        for name, run in make_calls().items():
            run(), run(), run()
            print(f"{name}: {time_host(run):.0f} µs", flush=True)
            if not functions or name in ("sdpa", "plain"):
                continue
            profile = cProfile.Profile()
            with profile:
                for _ in range(200):
                    run()
            torch.cuda.synchronize()
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(functions)
            for line in text.getvalue().splitlines()[5:]:
                parts = line.split(None, 5)
                if len(parts) == 6 and parts[0][0].isdigit():
                    where = parts[5].rpartition("/")[2]
                    us, calls = float(parts[1]) / 200 * 1e6, int(parts[0].partition("/")[0]) / 200
                    print(f"    {us:6.1f} µs  {calls:4.1f} ×  {where}")


if __name__ == "__main__":
    main()
