"""Every architecture of transformers, made small: eager against attn_implementation="regard", as a table for the docs.

PYTHONPATH=. python3 tools/hf_architectures.py --shard 0/2 --out part0.jsonl [--only llama,bert]
PYTHONPATH=. python3 tools/hf_architectures.py --write part0.jsonl part1.jsonl      # docs/records/architectures.md

Each small model runs a padded batch, one without padding, and two steps of decoding with a cache. "equal" is within
1e-5 of the largest output. Exits 1 if a model differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from over_architectures import judge_each, prepare

EQUAL, LIMIT_S = 1e-5, 90
PAGE = Path(__file__).parents[1] / "docs" / "records" / "architectures.md"
HEAD = """# Architectures of transformers under "regard"

Every model type of transformers {version} was made small from its configuration class and run with its own eager code
and with `attn_implementation="regard"`: a padded batch, one without padding, and two steps of decoding with a cache
(`tools/hf_architectures.py`).

| result | model types |
| --- | --- |
| equal to 1e-5 of the largest output | {equal} |
| refused: the model computes attention by its own code, not by `AttentionInterface` | {own} |
| refused with another reason | {refused} |
| differs | {differs} |
| not built small here | {unbuilt} |

`regard.using`, `examine` and `look` capture attention in another way and serve models that are refused here, too.

## Equal

{names_equal}

## Own code

{names_own}

## Refused or different

| model type | reason |
| --- | --- |
{rows_refused}

## Not built

| model type | why |
| --- | --- |
{rows_unbuilt}
"""


def judge(name: str) -> str:
    """Returns "equal", "own code", "refused: …", "differs: …" or "not built: …"."""
    from regard.health.models.tiny_architectures import NotBuilt, make_config
    from regard.health.models.tiny_inputs import find_runnable
    from regard.hf.self_check import check_architecture, compare

    try:
        model, make = find_runnable(partial(make_config, name))
        if not model._can_set_attn_implementation():
            return "own code"
        found = compare(model, make, "regard", EQUAL)
        if "differs" in found and not compare(model.double(), make, "regard", EQUAL):
            return "equal"  # the difference was rounding
    except NotBuilt as error:
        return f"not built: {error}"
    if found.startswith("unchecked"):
        return f"not built:{found.removeprefix('unchecked:')}"
    if not found or found.startswith("refused"):
        return found or "equal"
    os.environ["REGARD_HF_CHECK"] = "1"  # what a user meets
    try:
        check_architecture(type(model), model.config)
    except ValueError:
        return f"refused: by the self-check: {found}"
    finally:
        os.environ["REGARD_HF_CHECK"] = "0"
    return f"differs: {found}"


def run(shard: str, only: str | None, out: Path) -> None:
    os.environ["REGARD_HF_CHECK"] = "0"
    part, parts = map(int, shard.split("/"))
    known = prepare()
    for _ in judge_each(
        lambda name: dict(result=judge(name)), only.split(",") if only else known[part::parts], out, LIMIT_S
    ):
        pass


def write(parts: list[Path]) -> int:
    import transformers

    lines = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    results = {line["name"]: line.get("result") or f"not built: {line['reason']}" for line in lines}
    kinds = {name: result.partition(":")[0] for name, result in sorted(results.items())}
    count = Counter(kinds.values())

    def listed(kind: str) -> str:
        return ", ".join(f"`{name}`" for name in kinds if kinds[name] == kind) or "none"

    def rows(*wanted: str) -> str:
        found = [(name, results[name]) for name in kinds if kinds[name] in wanted]
        lines = [
            f"| `{name}` | {result.replace('not built: ', '').replace('|', '/')[:160]} |" for name, result in found
        ]
        return "\n".join(lines) or "| none | |"

    _, heading, checked = PAGE.read_text(encoding="utf-8").partition("\n## Under `regard check`")  # of another tool
    PAGE.write_text(
        HEAD.format(
            version=transformers.__version__, equal=count["equal"], own=count["own code"], refused=count["refused"],
            differs=count["differs"], unbuilt=count["not built"], names_equal=listed("equal"),
            names_own=listed("own code"), rows_refused=rows("refused", "differs"), rows_unbuilt=rows("not built"),
        )
        + heading + checked,
        encoding="utf-8",
    )  # fmt: skip
    print(dict(count))
    return int(count["differs"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", help="which part of how many")
    parser.add_argument("--only", help="model types, with commas between")
    parser.add_argument("--out", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--write", nargs="+", type=Path, help="make the page of these files")
    given = parser.parse_args()
    if given.write:
        return write(given.write)
    run(given.shard, given.only, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
