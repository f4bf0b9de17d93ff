"""Scores `regard.check`, and the rivals that are installed, on every bug of the museum and its sound twin.

python -m museum [SLUG …] [--json FILE] [--page FILE]
python -m museum --read FILE --page docs/museum.md      # the page from a run that was kept
python -m museum --rivals FILE --page docs/museum.md    # what rivals said from an older run: they are slow
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import time
import warnings
from pathlib import Path
from typing import Any

import museum
import regard
from museum import rivals, unseen
from museum.page import COUNTED, make_page, summarise

FIELDS = ("LINK", "SYMPTOM", "NEEDS", "make", "sound")
KINDS = ("code", "kind", "cause", "evidence")
OTHERS = ("parts", "page", "rivals", "unseen", "__main__")


def list_bugs() -> list[str]:
    """Returns the slugs of all bugs, sorted; those of `museum/unseen/` last, as "unseen.NAME"."""
    first, later = (sorted(one.name for one in pkgutil.iter_modules(one.__path__)) for one in (museum, unseen))
    return [name for name in first if name not in OTHERS] + [f"unseen.{name}" for name in later if name != "parts"]


def load(slug: str) -> Any:
    """Returns the bug's module, with its five fields."""
    bug = importlib.import_module(f"museum.{slug}")
    absent = [name for name in FIELDS if not hasattr(bug, name)]
    if absent:
        raise AttributeError(f"museum/{slug.replace('.', '/')}.py has no {', '.join(absent)}")
    return bug


def score(slug: str) -> dict[str, Any]:
    """Returns what is said of one bug: a failure that the twin has too is a false alarm and finds nothing."""
    bug = load(slug)
    made, twin_made = bug.make(), bug.sound()
    begin = time.perf_counter()
    verdict, twin = check(made), check(twin_made)
    seconds = time.perf_counter() - begin
    known = {one.code for one in twin.failures}
    new = [one for one in verdict.failures if one.code not in known]
    said = " ".join(str(getattr(one, name, "")) for one in new for name in KINDS).lower()
    said = said.replace(slug.rpartition(".")[2], "")  # the name of the bug's own file says nothing
    first = [describe(cause.finding) for cause in verdict.diagnosis if cause.finding in new]
    return {
        "slug": slug, "title": (bug.__doc__ or slug).strip().split("\n")[0], "link": bug.LINK, "symptom": bug.SYMPTOM,
        "found": bool(new), "named": any(word.lower() in said for word in bug.NEEDS),
        "says": [*first, *(text for one in new if (text := describe(one)) not in first)],
        "false_alarms": [describe(one) for one in twin.failures], "notes": [describe(one) for one in verdict.notes],
        "seconds": round(seconds, 1), "rivals": {name: compare(name, made, twin_made) for name in rivals.installed()},
    }  # fmt: skip


def check(made: tuple) -> Any:
    """Returns the verdict on a model, its batches and its options."""
    model, batches, options = made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return regard.check(model, batches, progress=False, **options)


def compare(name: str, made: tuple, twin: tuple) -> dict[str, list[str]]:
    """Returns what a rival says of the bug alone, what of the twin, and the error with which it stopped, if any."""
    try:
        said, known = (rivals.judge(name, one[0], one[1][0]) for one in (made, twin))
    except Exception as error:
        return {"says": [], "false_alarms": [], "stopped": [f"{type(error).__name__}: {error}"[:200]]}
    return {"says": sorted(said - known), "false_alarms": sorted(known), "stopped": []}


def describe(finding: Any) -> str:
    """Returns one line: code, kind, layer, evidence."""
    place = f" in {finding.layer}" if finding.layer else ""
    return f"{finding.code} {finding.kind}{place}: {finding.evidence}"


def print_row(row: dict[str, Any]) -> None:
    """Prints the state of regard, which rivals found it, and what regard says."""
    state = "named" if row["named"] else "found" if row["found"] else "MISSED"
    others = ", ".join(name for name, one in row["rivals"].items() if one["says"])
    also = f"  also {others}" if others else ""
    print(f"{row['slug']:38} {state:7} {row['seconds']:6.1f} s  {row['link']}{also}", flush=True)
    for line in row["says"][:3]:
        print(f"    {line[:200]}")
    for line in row["false_alarms"]:
        print(f"    FALSE ALARM ON THE TWIN: {line[:200]}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows that `--json` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser("python -m museum", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="bugs to score; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines, one per bug")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take what --json wrote, and score nothing")
    parser.add_argument("--rivals", type=Path, metavar="FILE", help="take what rivals said from what --json wrote")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the gallery, a Markdown page")
    options = parser.parse_args()
    rows, told = [], {}
    if options.rivals:
        told = {row["slug"]: row["rivals"] for row in read_rows(options.rivals)}
    if options.read:
        rows = read_rows(options.read)
    else:
        for slug in options.slugs or list_bugs():
            rows.append(score(slug))
            rows[-1]["rivals"] = told.get(slug, rows[-1]["rivals"])
            print_row(rows[-1])
    if options.json:
        options.json.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    if options.page:
        options.page.write_text(make_page(rows, len(list_bugs())), encoding="utf-8")
    print(f"\n{'':14}" + "".join(f"{word:>26}" for word in COUNTED))
    for name, counts in summarise(rows).items():
        print(f"{name:14}" + "".join(f"{text:>26}" for text in counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
