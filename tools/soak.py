"""Many calls of mixed shapes: memory, files, threads and compiled kernels must stay where they are after a warm-up.

`python tools/soak.py 1000000` (`make soak`) shows progress and ends with what moved; tests/fuzz/test_soak.py is short.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from pathlib import Path

import torch

import regard
from regard import normalizers
from regard._backends.cpu.jit import compile

NAMES = [name for name in normalizers.names() if normalizers.get(name).fused]
LENGTHS = [1, 2, 3, 5, 8, 13, 16, 31, 64, 100, 129, 257]


DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]


def one_call(pick: random.Random, names=NAMES, dtypes=DTYPES) -> None:
    """A row, its gradient, attention, its statistics or its gradient: any of them, of any small shape."""
    name, dtype = pick.choice(names), pick.choice(dtypes)
    kind = pick.random()
    if kind < 0.8:
        z = torch.randn(pick.randint(1, 6), pick.choice(LENGTHS), dtype=dtype, requires_grad=kind < 0.2)
        mask = torch.rand(z.shape) < 0.7 if pick.random() < 0.2 else None
        p = regard.normalize(z, name, temperature=pick.choice([1.0, 0.5]), mask=mask)
        if z.requires_grad:
            p.sum().backward()
        return
    grad = kind < 0.85
    q = torch.randn(1, 2, pick.randint(1, 9), 8, dtype=dtype, requires_grad=grad)
    k = torch.randn(1, 2, pick.choice(LENGTHS), 8, dtype=dtype)
    wanted = ("entropy", "max_logit") if kind < 0.92 else False
    found = regard.attention(q, k, k, is_causal=pick.random() < 0.5, normalizer=name, return_stats=wanted)
    if grad:
        (found[0] if wanted else found).sum().backward()


def held() -> dict[str, int]:
    """What a leak would raise: resident kilobytes, open files, threads, compiled kernels and their signatures."""
    gc.collect()
    kernels = list(compile._kernels.values())
    return {
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "kernels": len(kernels),
        "signatures": sum(len(kernel.signatures) for kernel in kernels),
    }


def soak(calls: int, seed: int = 0, tell=None, **kinds) -> tuple[dict[str, int], dict[str, int]]:
    """What was held after a tenth of the calls (at least 2,000, at most 20,000), and after all of them."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    warm = min(max(calls // 10, 2000), 20_000)
    before: dict[str, int] = {}
    for index in range(calls):
        if index == warm:
            before = held()
        if tell is not None and index % 10_000 == 0:
            tell(index, held())
        one_call(pick, **kinds)
    return before, held()


def main(calls: int) -> int:
    def tell(index, now):
        print(f"{index:>9,} of {calls:,}  " + "  ".join(f"{name} {value:,}" for name, value in now.items()), flush=True)

    before, after = soak(calls, tell=tell)
    moved = {name: after[name] - before[name] for name in before}
    print(f"moved since the warm-up: {moved}")
    flat = moved["memory"] < 16_384 and all(moved[name] <= 0 for name in moved if name != "memory")
    print("flat" if flat else "NOT FLAT")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
