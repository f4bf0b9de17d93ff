"""Decoding steps: microseconds of one call whose keys grow by one each time, beside calls of one fixed length.

    python benchmarks/growing_lengths.py [--against OTHER_TREE] [--rounds 3] [--json FILE]

A cache grows as a new tensor (torch.cat) or as a longer slice of one that was allocated whole. `--against` runs another
checkout by turns with this one, and prints its time over this one's. On a GPU the time includes the host's work: the
call is waited for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[1]
FIRST, STEPS = 320, 96
KINDS = {
    "plain": {},
    "two statistics": dict(return_stats=("entropy", "max_logit")),
    "all statistics": dict(return_stats=True),
    "entmax15": dict(normalizer="entmax15"),
}


def measure() -> dict[str, dict[str, float]]:
    """Median microseconds of a call by kind and by how its keys grow."""
    import regard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, 32, 8, 128) if device == "cuda" else (1, 8, 8, 64)
    batch, heads, groups, width = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    make = partial(torch.randn, device=device, dtype=dtype)
    q, whole = make(batch, heads, 1, width), make(batch, groups, 4096, width)
    found: dict[str, dict[str, float]] = {}
    for kind, options in KINDS.items():
        attend = partial(regard.attention, enable_gqa=heads != groups, **options)
        keys = {
            "fixed": lambda n: next(fixed),
            "cat": lambda n: whole[:, :, :n].contiguous(),
            "slice": lambda n: whole[:, :, :n],
        }
        fixed = itertools.cycle([keys["cat"](FIRST), keys["cat"](FIRST)])  # k and v are two tensors
        found[kind] = {}
        for name, take in keys.items():
            for n in range(FIRST, FIRST + 8):  # compiles
                attend(q, take(n), take(n))
            times = []
            for n in range(FIRST + 8, FIRST + 8 + STEPS):
                k, v = take(n), take(n)
                wait(device)
                start = time.perf_counter()
                attend(q, k, v)
                wait(device)
                times.append(time.perf_counter() - start)
            found[kind][name] = 1e6 * statistics.median(times)
    return found


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure_tree(tree: Path) -> dict[str, dict[str, float]]:
    """`measure` in a process of its own, with the package of another checkout."""
    code = (
        f"import json, runpy; m = runpy.run_path({str(Path(__file__).resolve())!r}); print(json.dumps(m['measure']()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trees = [HERE] + ([options.against.resolve()] if options.against else [])
    runs: list[list[dict]] = [[] for _ in trees]
    for _ in range(options.rounds):
        for own, tree in zip(runs, trees, strict=True):
            own.append(measure_tree(tree))
    table = {}
    for kind in KINDS:
        for name in ("fixed", "cat", "slice"):
            table[f"{kind}, {name}"] = [statistics.median(run[kind][name] for run in own) for own in runs]
    for name, numbers in table.items():
        ratio = f"   {numbers[1] / numbers[0]:.2f} ×" if len(numbers) > 1 else ""
        print(f"{name:24}", "  ".join(f"{x:7.0f} µs" for x in numbers) + ratio)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
