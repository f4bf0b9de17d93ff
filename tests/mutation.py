"""Mutants: change one sign, one comparison or one rescaling in the mathematics, and see whether the tests notice.

`python tests/mutation.py --sample 40` (`make mutate`) draws mutants from the files below, runs each file's tests on a
copy of the tree, and lists the survivors. A survivor is either a hole in the tests or a change that computes the same.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = "tests/test_kernel_attention.py"
LISTS = ["tests/test_kernel_lists.py", KERNELS, "-k", "not other_types"]
ROWS = ["tests/test_kernel_rows.py", "-k", "not editing_a_tile and not without_triton and not from_its_file"]
TESTS = {  # what is mutated, and what must notice
    "regard/statistics.py": [
        "tests/test_statistics.py",
        "tests/test_attention.py",
        "-k",
        "stat or merge or split or gain",
    ],
    **{
        f"regard/normalizers/{name}.py": ["tests/test_contract.py", "-k", name]
        for name in ("softmax", "softmax1", "softpick", "entmax", "entmax15", "relu", "sigmoid", "sparsemax")
    },
    "regard/normalizers/_families.py": ["tests/test_contract.py", "tests/test_normalize.py"],
    "regard/cpu/_rows_ratio.py": ["tests/test_cpu_rows.py", "-k", "softmax or relu or softpick or mask_of_any"],
    "regard/cpu/_rows_threshold.py": ["tests/test_cpu_rows.py", "-k", "sparsemax or entmax or mask_of_any"],
    "regard/cpu/_rows_side.py": ["tests/test_cpu_rows.py", "-k", "sparsemax or entmax15 or mask_of_any"],
    "regard/cpu/attention_rows.py": ["tests/test_cpu_attention.py"],
    "regard/cpu/attention_rows_backward.py": ["tests/test_cpu_attention.py"],
    "regard/cpu/attention_blocks.py": ["tests/test_cpu_attention.py"],
    "regard/kernels/tiles.py": [KERNELS],
    "regard/kernels/sweeps.py": [KERNELS],
    "regard/kernels/forward_online.py": [KERNELS],
    "regard/kernels/forward_threshold.py": [KERNELS],
    "regard/kernels/backward.py": [KERNELS],
    "regard/kernels/backward_bias.py": [KERNELS],
    "regard/kernels/statistics.py": [KERNELS],
    "regard/kernels/decode.py": ["tests/test_kernel_decode.py"],
    "regard/kernels/candidates.py": LISTS,
    "regard/kernels/gather.py": LISTS,
    "regard/kernels/support.py": LISTS,
    "regard/kernels/survey.py": LISTS,
    "regard/kernels/rows_online.py": ROWS,
    "regard/kernels/rows_pointwise.py": ROWS,
    "regard/kernels/rows_short.py": ROWS,
    "regard/kernels/rows_threshold.py": ROWS,
    "regard/kernels/rows_tiles.py": ROWS,
}
SWAPS = {ast.Add: "-", ast.Sub: "+", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    old: str
    new: str
    start: int  # offsets in the file
    end: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.old}  →  {self.new}"


def mutants(path: str) -> list[Mutant]:
    """Signs flipped, bounds moved by one, rescalings dropped; lines about addresses, shapes or texts are left alone."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw, found = text.encode(), []

    def add(node, new):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = raw[start:end].decode()
        if "\n" not in old and old != new:
            found.append(Mutant(path, node.lineno, old, new, start, end))

    for node in ast.walk(ast.parse(text)):
        line = lines[node.lineno - 1] if hasattr(node, "lineno") else ""
        if any(
            word in line for word in ("stride", "shape", "raise", 'f"', "//", "program_id", "cdiv", "range(", "assert")
        ):
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            add(node, f"({ast.unparse(node.left)} {SWAPS[type(node.op)]} {ast.unparse(node.right)})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            add(node, f"({ast.unparse(node.left)} {SWAPS[type(node.ops[0])]} {ast.unparse(node.comparators[0])})")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            add(node, f"({ast.unparse(node.left)})")  # a rescaling dropped
    return found


def outcome_of(mutant: Mutant, seconds: float) -> str:
    """What the file's tests say of a copy of the tree with this one change: noticed, SURVIVED, or hung."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("regard", "tests"):
            shutil.copytree(
                ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
            )
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        target = Path(folder) / mutant.path
        raw = target.read_bytes()
        target.write_bytes(raw[: mutant.start] + mutant.new.encode() + raw[mutant.end :])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            *TESTS[mutant.path],
        ]
        environment = {**os.environ, "PYTHONPATH": folder, "XDG_CACHE_HOME": str(Path(folder) / "cache")}
        try:
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "hung"
        refused = run.returncode < 0 or (run.returncode == 2 and "during collection" in run.stdout)
        if run.returncode not in (0, 1) and not refused:
            raise RuntimeError(
                f"{mutant}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
            )
        return "noticed" if run.returncode else "SURVIVED"


def drawn(sample: int, seed: int, only: str) -> list[Mutant]:
    """So many mutants, every file in turn, those within a file at random."""
    pick = random.Random(seed)
    pools = [pick.sample(found, len(found)) for path in TESTS if only in path and (found := mutants(path))]
    turns = itertools.zip_longest(*pools)
    return [mutant for turn in turns for mutant in turn if mutant is not None][:sample]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=40, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="I N: every N-th of them, from the I-th on")
    parser.add_argument("--only", help="a part of the path")
    parser.add_argument("--seconds", type=float, default=600, help="limit for one mutant's tests")
    parser.add_argument("--json", type=Path, help="write the outcome there as it grows")
    options = parser.parse_args()
    part, parts = options.part
    outcome: list[dict] = []
    sampled = drawn(options.sample, options.seed, options.only or "")[part::parts]
    for path in {tuple(TESTS[mutant.path]): mutant.path for mutant in sampled}.values():
        if outcome_of(Mutant(path, 0, "", "", 0, 0), options.seconds) != "SURVIVED":
            raise SystemExit(f"the tests of {path} fail or hang without any change: nothing would be learnt")
    for mutant in sampled:
        outcome.append({"mutant": str(mutant), "outcome": outcome_of(mutant, options.seconds)})
        noticed = sum(entry["outcome"] == "noticed" for entry in outcome)
        print(f"{outcome[-1]['outcome']:8}  {mutant}   ({noticed} of {len(outcome)})", flush=True)
        if options.json:
            options.json.write_text(json.dumps(outcome, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if noticed >= 0.95 * len(outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
