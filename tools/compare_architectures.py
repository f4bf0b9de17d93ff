"""Every architecture of transformers, made small: `regard.compare` on pairs that compute the same, as a table.

    python tools/compare_architectures.py --out pairs.jsonl [llama bert …]
    python tools/compare_architectures.py --write pairs.jsonl            # docs/records/sound-pairs.md

Pairs: eager against sdpa, FlexAttention and "regard", float32 against bfloat16, the same two in bfloat16, each row of a
batch alone, and a fingerprint against "regard" and bfloat16. Every difference that is told is a false alarm.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from over_architectures import TimeIsUp, judge_each, prepare
from torch import Tensor, nn

LIMIT_S = 40  # of one architecture
PAGE = Path(__file__).parents[1] / "docs" / "records" / "sound-pairs.md"
KERNELS = ("sdpa", "flex_attention", "regard")
PAIRS = (*KERNELS, "bfloat16", "bfloat16 regard", "alone", "fingerprint regard", "fingerprint bfloat16")
HEAD = """# Pairs that compute the same

{count} model types of transformers {version}, made small from their configurations with random weights, were compared
by `regard.compare` with a copy that computes the same, on two padded rows of 12 tokens
(`tools/compare_architectures.py`). A pair is right if the comparison says "the same within rounding".

| eager in float32 against | same | another | not run |
| --- | --- | --- | --- |
{rows}

Not run: the architecture has no such kernel, takes no bfloat16, its batch cannot be taken row by row, or it is random
by itself, which is what was said of it.

What is told below is true of transformers: outputs of plain forwards differ by 0.40 of their size (Phi-4's vision
tower without a mask: sdpa is causal), 0.75 (BLT's global part, the same), 0.03 and 0.07 (Granite Speech and Parakeet
under FlexAttention), and VideoMT's videos depend on the others of their batch.

With heads, labels and a cache: 148 of 148 further pairs of 39 language models, masked models and encoder-decoders
(eager against itself, sdpa and bfloat16, in loss and decoding too) were the same.

## Where a difference was told

| model type | pair | what was said |
| --- | --- | --- |
{told}
"""


class Whole(nn.Module):
    """A model that returns its first output alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        output = self.model(**batch)
        return output if isinstance(output, Tensor) else output[0]


class Alone(Whole):
    """The same, with every row in a batch of its own."""

    def forward(self, **batch: Any) -> Tensor:
        rows = range(len(next(iter(batch.values()))))
        parts = [super(Alone, self).forward(**{name: x[at : at + 1] for name, x in batch.items()}) for at in rows]
        return torch.cat(parts)


def make_pairs(model: nn.Module, batch: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields (name, a function that compares); what cannot be built raises when it is called."""
    import regard

    def switch(kernel: str, low: bool = False) -> nn.Module:
        other: Any = copy.deepcopy(model)
        other.set_attn_implementation(kernel)
        return other.bfloat16() if low else other  # .to(dtype) would cast tables of complex numbers as well

    for kernel in KERNELS:
        yield kernel, lambda kernel=kernel: regard.compare(model, switch(kernel), [batch])
    yield "bfloat16", lambda: regard.compare(model, copy.deepcopy(model).bfloat16(), [batch])
    yield (
        "bfloat16 regard",
        lambda: regard.compare(copy.deepcopy(model).bfloat16(), switch("regard", low=True), [batch]),
    )

    def alone() -> Any:
        with torch.no_grad():
            if (output := Whole(model)(**batch)).ndim < 3:
                raise ValueError(f"its output {list(output.shape)} has no row per token")
        return regard.compare(Whole(model), Alone(copy.deepcopy(model)), [batch])

    yield "alone", alone
    taken: list[Any] = []

    def hold(other: Callable[[], nn.Module]) -> Any:
        if not taken:
            taken.append(regard.fingerprint(model, [batch]))
        return regard.compare(taken[0], other(), [batch])

    yield "fingerprint regard", lambda: hold(lambda: switch("regard"))
    yield "fingerprint bfloat16", lambda: hold(lambda: copy.deepcopy(model).bfloat16())


def judge(name: str) -> dict[str, Any]:
    """Returns the result of every pair of one architecture."""
    from regard.health.models.tiny_architectures import make_config
    from regard.health.models.tiny_inputs import find_runnable

    pairs: dict[str, list[Any]] = {}
    model, make = find_runnable(partial(make_config, name))
    batch = make()
    for pair, compare in make_pairs(model, batch):
        started = time.process_time()
        try:
            found = compare()
            said = "same" if found.same else found.line
        except TimeIsUp:
            return dict(pairs=pairs, reason=f"it takes more than {LIMIT_S} s")
        except Exception as error:
            said = f"not run: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        pairs[pair] = [said, round(time.process_time() - started, 1)]
    return dict(pairs=pairs)


def run(names: list[str], out: Path) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # FlexAttention as written
    known = prepare()
    for line in judge_each(judge, names or known, out, LIMIT_S, add=True):
        for pair, (said, seconds) in line.get("pairs", {}).items():
            if said != "same":
                print(f"{line['name']:24} {pair:20} {seconds:5.1f} s  {said}", flush=True)


def write(path: Path) -> int:
    import transformers

    lines = {one["name"]: one for one in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    count: Counter[tuple[str, str]] = Counter()
    told = []
    for name, line in sorted(lines.items()):
        for pair, (said, _) in line.get("pairs", {}).items():
            aside = said.startswith("not run") or "another output on each run" in said
            kind = said if said == "same" else "not run" if aside else "another"
            count[pair, kind] += 1
            if kind == "another":
                told.append(f"| `{name}` | {pair} | {said.replace('|', '/')[:200]} |")
    rows = [f"| {pair} | " + " | ".join(str(count[pair, kind]) for kind in ("same", "another", "not run")) + " |"
            for pair in PAIRS]  # fmt: skip
    PAGE.write_text(HEAD.format(
        version=transformers.__version__, count=sum(bool(one.get("pairs")) for one in lines.values()),
        rows="\n".join(rows), told="\n".join(told) or "| none | | |",
    ), encoding="utf-8")  # fmt: skip
    print(dict(count))
    return int(bool(told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types (all that transformers knows)")
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"), help="lines are added to this file")
    parser.add_argument("--write", type=Path, help="make the page of this file")
    given = parser.parse_args()
    if given.write:
        return write(given.write)
    run(given.names, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
