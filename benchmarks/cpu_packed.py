"""CPU time of 64 packed documents beside their share of the dense call, one thread; `--against` a second tree by turns.

    OMP_NUM_THREADS=1 python benchmarks/cpu_packed.py [--turns 15] [--against PATH]

Prints a Markdown table. PATH is a folder that holds another version of the package `regard`. Each tree runs in a
process of its own, and the two are asked alternately, in random order, so that other load on the machine meets both.
Times are process time: what other processes use is not counted, but their use of caches and memory is felt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

TOKENS, HEADS, WIDTH, DOCUMENTS = 4096, 8, 64, 64
KINDS = ("one document", "equal lengths", "mixed lengths")
CASES = [(kind, causal, stats) for kind in KINDS for causal in (False, True) for stats in (False, True)]
DENSE_EVERY = 5  # turns: a dense call takes as long as 20 packed ones


def make_ends(kind: str) -> list[int]:
    """Where documents begin and end; mixed lengths are between random places."""
    if kind == "one document":
        return [0, TOKENS]
    if kind == "equal lengths":
        return list(range(0, TOKENS + 1, TOKENS // DOCUMENTS))
    return [0, *sorted(random.Random(0).sample(range(1, TOKENS), DOCUMENTS - 1)), TOKENS]


def find_share(kind: str, causal: bool) -> float:
    """The visible scores over those of one document."""

    def count(ends: list[int]) -> int:
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        return sum(n * (n + 1) // 2 if causal else n * n for n in lengths)

    return count(make_ends(kind)) / count([0, TOKENS])


def serve() -> None:
    """Answers each line, the number of a case, by the seconds that it took."""
    import torch

    import regard

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(TOKENS, HEADS, WIDTH, generator=generator) for _ in range(3)]

    def attend(case: tuple[str, bool, bool]) -> None:
        kind, causal, stats = case
        regard.attention_varlen(*tensors, make_ends(kind), causal=causal, return_stats=stats)

    for case in CASES:  # compiles
        attend(case)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.process_time()
        attend(CASES[int(line)])
        print(time.process_time() - start, flush=True)


class Tree:
    """A process that times one version of the package."""

    def __init__(self, path: Path):
        environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        if self._read() != "ready":
            raise SystemExit(f"{path}: the timing process did not start")
        self.times: dict[int, list[float]] = {at: [] for at in range(len(CASES))}

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, at: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{at}\n")
        self.process.stdin.flush()
        self.times[at].append(float(self._read()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    own = Tree(Path(__file__).resolve().parents[1])
    other = None if given.against is None else Tree(given.against.resolve())
    trees = [tree for tree in (own, other) if tree is not None]
    for turn in range(given.turns):
        for at, case in enumerate(CASES):
            if case[0] != "one document" or turn % DENSE_EVERY == 0:
                for tree in random.sample(trees, len(trees)):
                    tree.measure(at)
    print("| documents | order | statistics | ms | share of one document, ms | over its share |", end="")
    print(" before, ms | after / before, paired |" if other else "")
    print("| --- | --- | --- | ---: | ---: | ---: |" + (" ---: | ---: |" if other else ""))
    for at, (kind, causal, stats) in enumerate(CASES):
        dense = 1e3 * median(own.times[CASES.index((KINDS[0], causal, stats))])
        found, share = 1e3 * median(own.times[at]), find_share(kind, causal) * dense
        cells = [kind, "causal" if causal else "full", "all" if stats else "none", f"{found:.1f}", f"{share:.1f}"]
        cells.append(f"{found / share:.1f}")
        if other:
            ratio = median(a / b for a, b in zip(own.times[at], other.times[at], strict=True))
            cells += [f"{1e3 * median(other.times[at]):.1f}", f"{ratio:.2f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
