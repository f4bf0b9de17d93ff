"""Block sizes of the plain kernels on calls that are slow with those of the table in `config.py`, tried one by one.

    PYTHONPATH=. python3 benchmarks/h200_blocks.py [PART OF A NAME …]

Prints the milliseconds of the whole call, forward or backward, for each (queries, keys, warps, stages, bulk copies),
the table's first. Compiled by other processes beforehand; a configuration that does not compile is named.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

Blocks = tuple[int, int, int, int, bool]
WIDE = [(64, 64, 8, 1), (64, 64, 8, 2), (128, 32, 8, 2), (32, 64, 8, 2)]
DKV = [(64, 64, 8, 1), (64, 64, 8, 2), (64, 32, 8, 2), (32, 128, 8, 1)]
NARROW = [(128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 128, 8, 2)]
MIDDLE = [(64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 2), (32, 128, 8, 2)]
# name: normaliser, (batch, heads, key heads, queries, keys, width), causal, window, dtype
CALLS: dict[str, tuple] = {
    "window d256": ("softmax", (1, 8, 4, 8192, 8192, 256), True, 1024, "bfloat16"),
    "window d256 entmax15": ("entmax15", (1, 8, 4, 8192, 8192, 256), True, 1024, "bfloat16"),
    "SigLIP d72 entmax15": ("entmax15", (32, 16, 16, 729, 729, 72), False, None, "bfloat16"),
    "d160 entmax15": ("entmax15", (2, 20, 20, 1500, 1500, 160), True, None, "bfloat16"),
    "SD d40 entmax15": ("entmax15", (8, 8, 8, 4096, 77, 40), False, None, "float16"),
    "prefill entmax15": ("entmax15", (8, 32, 8, 32, 8192, 128), False, None, "bfloat16"),
    "decode entmax15": ("entmax15", (48, 32, 8, 1, 6000, 128), False, None, "bfloat16"),
    "prefill softmax": ("softmax", (8, 32, 8, 32, 8192, 128), False, None, "bfloat16"),
}
TRIALS: list[tuple[str, str, str, list]] = [  # call, direction, kernel, blocks
    ("window d256", "backward", "backward_dq", WIDE),
    ("window d256", "backward", "backward_dkv", DKV),
    ("SigLIP d72 entmax15", "forward", "forward_threshold", NARROW),
    ("SigLIP d72 entmax15", "forward", "lists from 256 keys", []),
    ("SigLIP d72 entmax15", "backward", "backward_dkv", MIDDLE),
    ("d160 entmax15", "forward", "forward_threshold", WIDE[:3]),
    ("d160 entmax15", "forward", "lists from 256 keys", []),
    ("prefill softmax", "forward", "decode of 64 queries", []),
    ("prefill entmax15", "forward", "forward_threshold", [(32, 64, 4, 3), (32, 128, 4, 3)]),
    ("decode entmax15", "forward", "forward_threshold", [(16, 64, 4, 3), (16, 128, 4, 3)]),
]


@contextmanager
def with_blocks(kernel: str, blocks: Blocks | None) -> Iterator[None]:
    """The library with other blocks of one kernel."""
    from regard._backends.gpu import tape
    from regard._backends.gpu.attention import config
    from regard._backends.gpu.attention.forward import decode
    from regard._backends.gpu.attention.sparse import launch as sparse

    chosen = config._choose_blocks

    def choose(p, name, *rest):
        if name != kernel or blocks is None:
            return chosen(p, name, *rest)
        m, n, warps, stages, bulk = blocks
        return m, n, bulk, dict(num_warps=warps, num_stages=stages)

    tape._tapes.clear()
    with contextlib.ExitStack() as stack:
        if kernel.startswith("lists") and blocks:
            least = dict.fromkeys(sparse.LEAST_KEYS, 256)
            stack.enter_context(patch.object(sparse, "LEAST_KEYS", least))
        elif kernel.startswith("decode") and blocks:
            stack.enter_context(patch.object(decode, "QUERIES", 64))
        else:
            stack.enter_context(patch.object(config, "_choose_blocks", choose))
        yield
    tape._tapes.clear()


def make_call(name: str, direction: str) -> Callable:
    """The call of the GPU backend, made in the blocks that are tried."""
    import torch

    from regard import normalizers
    from regard._backends.gpu.attention import launch
    from regard._call.problem import Problem, Upstream

    normalizer, (b, h, g, m, n, d), causal, window, dtype = CALLS[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, x, y, d, device="cuda", dtype=getattr(torch, dtype)) for x, y in ((h, m), (g, n), (g, n)))
    p = Problem(q, k, v, normalizers.get(normalizer), 1.0 / math.sqrt(d), causal=causal, left=window)
    if direction == "forward":
        return lambda: launch.forward(p)
    found = launch.forward(p)
    upstream = Upstream(torch.randn_like(found.o))
    return lambda: launch.backward(p, found, upstream)


def list_trials(names: list[str]) -> list[tuple[str, str, str, Blocks | None]]:
    """(call, direction, kernel, blocks); None: those of the table."""
    found: list[tuple[str, str, str, Blocks | None]] = []
    for call, direction, kernel, blocks in TRIALS:
        if names and not any(part in f"{call} {direction} {kernel}" for part in names):
            continue
        found.append((call, direction, kernel, None))
        blocks = blocks or [(0, 0, 0, 0)]
        found += [(call, direction, kernel, (*each, bulk)) for each, bulk in itertools.product(blocks, (False, True))]
    return found


def compile_trial(trial: tuple) -> str:
    """Run a trial once; "" or what went wrong."""
    call, direction, kernel, blocks = trial
    try:
        import torch

        with with_blocks(kernel, blocks):
            make_call(call, direction)()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"


def main() -> None:
    from triton.testing import do_bench

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of 'call direction kernel'; all without")
    trials = list_trials(parser.parse_args().names)
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        wrong = pool.map(compile_trial, trials, chunksize=1)
    best: dict[tuple, list] = {}
    for trial, failure in zip(trials, wrong, strict=True):
        call, direction, kernel, blocks = trial
        if failure:
            best.setdefault(trial[:3], []).append((math.inf, f"{blocks} {failure}"))
            continue
        with with_blocks(kernel, blocks):
            run = make_call(call, direction)
            run(), run(), run()
            ms = do_bench(run, warmup=5, rep=12, return_mode="median")
        best.setdefault(trial[:3], []).append((ms, str(blocks or "table")))
    for (call, direction, kernel), found in best.items():
        told = ", ".join(f"{text} {ms:.3f}" for ms, text in sorted(found) if ms < math.inf)
        failed = sum(ms == math.inf for ms, _ in found)
        print(f"{call} {direction} {kernel}: {told}; {failed} failed", flush=True)


if __name__ == "__main__":
    main()
