"""Mutants: change one sign, one bound or one rescaling in the mathematics, and see whether the tests notice.

`python tests/mutation.py --sample 40` (`make mutate`) draws mutants from the files below, runs each file's tests on a
copy of the tree, and lists the survivors: holes in the tests, or changes that compute the same. `--json FILE` keeps the
outcome, `--publish FILE…` writes such files as docs/mutants.md. Kernels without an interpreter need a GPU (`--gpu`).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mutation_page import EQUIVALENT, place, publish

ROOT = Path(__file__).parents[1]
STATISTICS = [f"tests/test_statistics{part}.py" for part in ("", "_digits", "_merge", "_weights")]
CONTRACT = [
    *(f"tests/test_{name}.py" for name in ("contract", "records", "normalize", "kernel_rows")),
    *STATISTICS,
    "-k",
]
KERNELS = ["tests/test_kernel_attention.py", "-k", "not other_types"]
LISTS = ["tests/test_kernel_lists.py", *KERNELS]
DECODE = ["tests/test_kernel_decode.py"]
ROWS = ["tests/test_kernel_rows.py", "-k", "not editing_a_tile and not without_triton"]
CPU = ["tests/test_cpu_attention.py", "tests/test_cpu_attention_blocks.py"]


def of(folder: str, names: str, tests: list[str]) -> dict[str, list[str]]:
    return {f"regard/{folder}/{name}.py": [*tests] for name in names.split()}


TESTS = {  # what is mutated, and what must notice
    **of("statistics", "dense state terms", STATISTICS),
    **of("normalizers", "softpick", [*CONTRACT, "softpick and not citizen"]),
    **of("normalizers", "entmax entmax15", [*CONTRACT, "(entmax or alpha) and not citizen"]),
    **of("normalizers", "relu", [*CONTRACT, "relu and not citizen"]),
    **of("normalizers", "sigmoid", [*CONTRACT, "sigmoid and not citizen"]),
    **of("normalizers", "_near_softmax", ["tests/test_derivatives.py", "tests/test_normalize.py", "-k", "alpha"]),
    **of("normalizers", "sparsemax", [*CONTRACT, "sparsemax and not citizen"]),
    **of(
        "normalizers",
        "_families _record",
        [*CONTRACT, "not ninth and not citizen and not editing and not without_triton"],
    ),
    **of("cpu", "_rows_ratio", ["tests/test_cpu_rows.py", "-k", "softmax or relu or softpick or mask_of_any"]),
    **of("cpu", "_rows_threshold _rows_side", ["tests/test_cpu_rows.py", "-k", "sparsemax or entmax or mask_of_any"]),
    **of("cpu", "_rows_pointwise", ["tests/test_cpu_rows.py", "-k", "sigmoid or mask_of_any"]),
    **of("cpu", "_rows_parts words _intrinsics", ["tests/test_cpu_rows.py"]),
    **of("cpu", "attention attention_tiles attention_rows attention_rows_backward attention_blocks", CPU),
    **of("kernels", "tiles sweeps statistics forward_online forward_threshold", KERNELS),
    **of("kernels", "forward_statistics forward_lesser moments", ["tests/test_kernel_moments.py"]),
    **of("kernels", "backward backward_bias", LISTS),
    **of("kernels", "gather levels support survey", LISTS),
    **of("kernels", "backward_product", ["tests/test_kernel_stored.py"]),
    **of("kernels", "forward_again", ["tests/test_kernel_attention.py", "-k", "done_again"]),
    **of("kernels", "decode decode_parts", DECODE),
    **of("kernels", "rows_exact rows_long rows_online rows_pointwise rows_short", ROWS),
    **of("kernels", "rows_terms rows_threshold rows_tiles traits", ["tests/test_kernel_extremes.py", *ROWS]),
}
ON_A_GPU = {  # no interpreter runs these
    **of("kernels", "candidates", ["tests/gpu/test_lists.py"]),
    **of("kernels", "forward_hopper hopper_ring hopper_rows", ["tests/gpu/test_hopper.py"]),
}
SWAPS = {ast.Add: "-", ast.Sub: "+", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
OTHER = {"maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax"}
ASIDE = ("stride", "shape", "raise", 'f"', "//", "program_id", "cdiv", "range(", "assert")  # lines about something else
GUESSES = {"regard/kernels/survey.py": ("worthwhile", "power", "tail", "guess")}  # where τ is sought first, no more


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    column: int
    old: str
    new: str
    text: str  # the line, stripped
    start: int  # offsets in the file
    end: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.old}  →  {self.new}"


def mutants(path: str) -> list[Mutant]:
    """Signs flipped, bounds moved by one, extremes exchanged, rescalings dropped."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line.encode()) for line in lines)]
    raw, found = text.encode(), []

    def add(node, new):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = raw[start:end].decode()
        if "\n" not in old and old != new:
            text = lines[node.lineno - 1].strip()
            found.append(Mutant(path, node.lineno, node.col_offset, old, new, text, start, end))

    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in GUESSES.get(path, ())]
    guessing = {line for node in functions for line in range(node.lineno, node.end_lineno + 1)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", None)
        if line is None or line in guessing or any(word in lines[line - 1] for word in ASIDE):
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            if not is_zero(node.right):
                add(node, f"({ast.unparse(node.left)} {SWAPS[type(node.op)]} {ast.unparse(node.right)})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            add(node, f"({ast.unparse(node.left)} {SWAPS[type(node.ops[0])]} {ast.unparse(node.comparators[0])})")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            add(node, f"({ast.unparse(node.left)})")  # a rescaling dropped
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if not isinstance(node.operand, ast.Constant):
                add(node, f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.Attribute) and node.attr in OTHER:
            add(node, f"{ast.unparse(node.value)}.{OTHER[node.attr]}")
    return found


def is_zero(node: ast.expr) -> bool:
    """x·0, written to give a sum the shape of x: its sign is no mathematics."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and ast.unparse(node.right) in ("0", "0.0")


class Bench:
    """A copy of the tree that is changed in one place, tested in a forked process and put right again.

    What takes long to import is imported once. Compiled CPU kernels are kept from one mutant to the next: they lie
    under the hash of all the code in them.
    """

    def __init__(self, folder: str, cache: Path | None, seconds: int, gpu: bool) -> None:
        self.folder, self.seconds = Path(folder), seconds
        for name in ("regard", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        os.environ["XDG_CACHE_HOME"] = str((cache or self.folder / "cache").resolve())
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        if not gpu:
            os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
        for name in ("torch", "numba", "triton", "triton.language", "mpmath", "hypothesis", "pytest"):
            importlib.import_module(name)

    def outcome(self, tests: list[str], mutant: Mutant | None = None) -> str:
        """What the tests say: noticed (a failure, a refusal at import, a crash, a hang) or SURVIVED."""
        if mutant is None:
            return self.run(tests)
        target = self.folder / mutant.path
        raw = target.read_bytes()
        target.write_bytes(raw[: mutant.start] + mutant.new.encode() + raw[mutant.end :])
        try:
            return self.run(tests)
        finally:
            target.write_bytes(raw)

    def run(self, tests: list[str]) -> str:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (self.seconds, self.seconds + 5))  # a busy machine is no hang
            self.test_and_end(tests)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "noticed: hangs"
        told = (self.folder / "told").read_text(encoding="utf-8", errors="replace")
        if code < 0:
            return "noticed: crashes"
        if code and ("\nERROR tests" in told or "ImportError while" in told):
            return "noticed: refused at import"
        if code not in (0, 1):
            raise RuntimeError(f"pytest ended with {code}\n{told[-2000:]}")
        failed = next((line.split(" ")[1] for line in told.splitlines() if line.startswith("FAILED")), "")
        return f"noticed: {failed.rpartition('::')[2]}" if code else "SURVIVED"

    def test_and_end(self, tests: list[str]) -> None:
        """The forked process: pytest on the copy, its words into the file `told`, and out."""
        told = os.open(self.folder / "told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(told, stream)
        os.chdir(self.folder)
        sys.path[:] = [str(self.folder), *(place for place in sys.path if not place.startswith(str(ROOT / "tests")))]
        sys.dont_write_bytecode = True
        import pytest

        code = 3
        try:
            code = pytest.main(["-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "default", *tests])
        finally:
            sys.stdout.flush()
            os._exit(int(code))


def drawn(table: dict, sample: int, seed: int, only: list[str]) -> list[Mutant]:
    """So many mutants, every file in turn, those within a file at random."""
    pick = random.Random(seed)
    chosen = [path for path in table if not only or any(word in path for word in only)]
    pools = [pick.sample(found, len(found)) for path in chosen if (found := mutants(path))]
    turns = itertools.zip_longest(*pools)
    return [mutant for turn in turns for mutant in turn if mutant is not None][:sample]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=40, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="I N: every N-th of them, from the I-th on")
    parser.add_argument("--only", nargs="*", default=[], help="parts of paths")
    parser.add_argument(
        "--unchecked", action="store_true", help="another part has seen the tests pass without a change"
    )
    parser.add_argument("--cache", type=Path, help="compiled CPU kernels, if parts share them")
    parser.add_argument("--again", type=Path, nargs="+", help="only what survived according to these outcomes")
    parser.add_argument("--gpu", action="store_true", help="the kernels that only a GPU runs")
    parser.add_argument("--seconds", type=int, default=600, help="limit of processor time for one mutant's tests")
    parser.add_argument("--commit", default="a working tree", help="what the tree is, for the record")
    parser.add_argument("--json", type=Path, help="write the outcome there as it grows")
    parser.add_argument("--publish", type=Path, nargs="+", help="outcomes to write as docs/mutants.md")
    options = parser.parse_args()
    if options.publish:
        publish(options.publish)
        return 0
    part, parts = options.part
    table = ON_A_GPU if options.gpu else TESTS
    sampled = drawn(table, options.sample, options.seed, options.only)
    if options.again:
        told = [entry for file in options.again for entry in json.loads(file.read_text(encoding="utf-8"))]
        alive = {place(entry) for entry in told if entry["outcome"] == "SURVIVED"}
        every = drawn(table, 10**6, options.seed, options.only)
        sampled = [mutant for mutant in every if (mutant.path, mutant.text, mutant.column, mutant.new) in alive]
    sampled = sampled[part::parts]
    outcome: list[dict] = []
    sound: list[list[str]] = []  # tests that pass without any change
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, options.cache, options.seconds, options.gpu)
        for mutant in sampled:
            tests = table[mutant.path]
            if tests not in sound and not options.unchecked:
                if bench.outcome(tests) != "SURVIVED":
                    raise SystemExit(f"the tests of {mutant.path} fail without any change: nothing would be learnt")
                sound.append(tests)
            result = bench.outcome(tests, mutant)
            told = {"mutant": str(mutant), "column": mutant.column, "text": mutant.text, "new": mutant.new}
            outcome.append({**told, "outcome": result, "commit": options.commit})
            print(f"{result}  {mutant}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(outcome, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    survived = [e for e in outcome if e["outcome"] == "SURVIVED" and (e["text"], e["new"]) not in EQUIVALENT]
    print(f"{len(outcome) - len(survived)} of {len(outcome)} noticed or the same")
    return 0 if len(survived) <= 0.05 * len(outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
