"""Scores `regard.check` on every bug of the museum and its sound twin: `python -m museum [SLUG …] [--json]`."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import time
import warnings
from typing import Any

import museum
import regard

FIELDS = ("LINK", "SYMPTOM", "NEEDS", "make", "sound")
KINDS = ("code", "kind", "cause", "evidence")


def list_bugs() -> list[str]:
    """Returns the slugs of all bugs, sorted."""
    return sorted(one.name for one in pkgutil.iter_modules(museum.__path__) if one.name not in ("parts", "__main__"))


def load(slug: str) -> Any:
    """Returns the bug's module, with its five fields."""
    bug = importlib.import_module(f"museum.{slug}")
    absent = [name for name in FIELDS if not hasattr(bug, name)]
    if absent:
        raise AttributeError(f"museum/{slug}.py has no {', '.join(absent)}")
    return bug


def check(make: Any) -> tuple[Any, float]:
    """Returns the verdict on what `make` makes, and its seconds."""
    model, batches, options = make()
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = regard.check(model, batches, progress=False, **options)
    return verdict, time.perf_counter() - begin


def score(slug: str) -> dict[str, Any]:
    """Returns what regard says of one bug: a failure that the twin has too is a false alarm and finds nothing."""
    bug = load(slug)
    verdict, seconds = check(bug.make)
    twin, twin_seconds = check(bug.sound)
    known = {one.code for one in twin.failures}
    new = [one for one in verdict.failures if one.code not in known]
    said = " ".join(str(getattr(one, name, "")) for one in new for name in KINDS).lower()
    return {
        "slug": slug, "link": bug.LINK, "symptom": bug.SYMPTOM,
        "found": bool(new), "named": any(word.lower() in said for word in bug.NEEDS),
        "says": [describe(one) for one in new], "false_alarms": [describe(one) for one in twin.failures],
        "notes": [describe(one) for one in verdict.notes], "seconds": round(seconds + twin_seconds, 1),
    }  # fmt: skip


def describe(finding: Any) -> str:
    """Returns one line: code, kind, layer, evidence."""
    place = f" in {finding.layer}" if finding.layer else ""
    return f"{finding.code} {finding.kind}{place}: {finding.evidence}"


def summarise(rows: list[dict[str, Any]]) -> str:
    """Returns the last line: found, named, twins with a false alarm."""
    found, named = sum(row["found"] for row in rows), sum(row["named"] for row in rows)
    alarms, count = sum(bool(row["false_alarms"]) for row in rows), max(len(rows), 1)
    return (
        f"{len(rows)} bugs: {found} found ({found / count:.0%}), {named} named ({named / count:.0%}), "
        f"{alarms} sound twins with a false alarm ({alarms / count:.0%})"
    )


def main() -> int:
    parser = argparse.ArgumentParser("python -m museum", description=__doc__)
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="bugs to score; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON lines, one per bug")
    options = parser.parse_args()
    rows = []
    for slug in options.slugs or list_bugs():
        row = score(slug)
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        state = "named" if row["named"] else "found" if row["found"] else "MISSED"
        print(f"{slug:38} {state:7} {row['seconds']:6.1f} s  {row['link']}", flush=True)
        for line in row["says"][:3]:
            print(f"    {line[:200]}")
        for line in row["false_alarms"]:
            print(f"    FALSE ALARM ON THE TWIN: {line[:200]}")
    if not options.json:
        print(summarise(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
