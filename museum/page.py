"""The museum's page in the documentation: the scoreboard, and each bug with its symptom and what regard says."""

from __future__ import annotations

import importlib.metadata
import subprocess
from html import escape
from pathlib import Path
from typing import Any

COUNTED = ("bugs found", "bugs named", "sound twins with alarms", "not run")
ABOUT = {
    "pytest-torch": "the tests of `pytest --torch-model`, and its streaming check with the cache that regard finds",
    "torchtest2": "`check_model` on one batch, its warnings counted; it is given no loss, as regard is not",
    "model-clinic": "`diagnose` on the weights: it does not run the model without a tokenizer",
}
UNSEEN = "regard, unseen ones"
LONGEST = 260  # characters of what regard says


def summarise(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns for each tool what is counted; the rivals' words are not judged for the cause."""
    table = {}
    for name, some in (("regard", rows), (UNSEEN, [row for row in rows if is_unseen(row)])):
        found, named = sum(row["found"] for row in some), sum(row["named"] for row in some)
        alarms = sum(bool(row["false_alarms"]) for row in some)
        table[name] = [share(found, some), share(named, some), share(alarms, some), "0"]
    if not any(map(is_unseen, rows)):
        del table[UNSEEN]
    for name in list_rivals(rows):
        own = [row["rivals"][name] for row in rows if name in row["rivals"]]
        found, alarms = (sum(bool(one[part]) for one in own) for part in ("says", "false_alarms"))
        left = len(rows) - len(own) + sum(bool(one["stopped"]) for one in own)
        table[name] = [share(found, own), "–", share(alarms, own), str(left)]
    return table


def is_unseen(row: dict[str, Any]) -> bool:
    return str(row["slug"]).startswith("unseen.")


def list_rivals(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the rivals that were given some of the bugs."""
    return list(dict.fromkeys(name for row in rows for name in row["rivals"]))


def share(count: int, rows: list[Any]) -> str:
    return f"{count} of {len(rows)} ({count / max(len(rows), 1):.0%})"


def make_page(rows: list[dict[str, Any]], count: int | None = None) -> str:
    """Returns the Markdown of the whole page; `count`: the museum's bugs, if not all were scored."""
    missing = 0 if count is None else count - len(rows)
    left = f" {missing} more bugs of the museum were not scored in this run." if missing > 0 else ""
    head = "| tool | " + " | ".join(COUNTED) + " |\n| --- | ---: | ---: | ---: | ---: |\n"
    board = "\n".join(f"| {name} | {' | '.join(counts)} |" for name, counts in summarise(rows).items())
    about = "\n".join(f"- {name}{find_version(name)}: {ABOUT[name]}." for name in list_rivals(rows))
    unseen = sum(map(is_unseen, rows))
    gallery = "\n".join(map(show_bug, rows))
    return f"""# The museum of attention bugs

{len(rows)} public bugs of attention, each made again as a small patch of a small model in `museum/`, beside the same
model without it. `python -m museum` checks both and prints this scoreboard; `python -m museum SLUG` one of them. Each
tool is given the model and its batches, and nothing else.{left}

*Found*: a failure that the sound twin does not have. *Named*: its line has a word of the cause (`NEEDS` in the bug's
file); what rivals say is not judged. An alarm on a sound twin counts whatever it says. Those who wrote the checks knew
the first {len(rows) - unseen} of these bugs. The last {unseen} (`museum/unseen/`) were written by engineers who had
seen neither the checks nor this museum; their misses were read and mended afterwards, so that no rate here is one of
unseen bugs: [the record](records/calibration.md) has what was found at first sight.

{head}{board}

{about}

Made by `python -m museum --page docs/museum.md` at {describe_commit()}. The second part is
[the calibration](records/calibration.md): made-up bugs in trained models, held out by halves.

{gallery}
"""


def show_bug(row: dict[str, Any]) -> str:
    """Returns a section: the bug, where it was reported, its symptom, what regard says, which rivals found it."""
    repository, _, number = row["link"].partition("#")
    others = ", ".join(name for name, one in row["rivals"].items() if one["says"]) or (
        "none" if row["rivals"] else "not run"
    )
    state = "" if row["named"] else " (found, the cause not named)" if row["found"] else " (missed)"
    says = f"`{quote(row['says'][0])}`" if row["says"] else "nothing"
    return f"""## {row["slug"].removeprefix("unseen.").replace("_", " ")}{" (unseen)" if is_unseen(row) else ""}

{escape(row["title"], quote=False)} [{row["link"]}](https://github.com/{repository}/issues/{number})

- Symptom: {escape(row["symptom"], quote=False)}
- regard{state}: {says}
- Rivals that find it: {others}
"""


def quote(text: str) -> str:
    """Returns text that may stand between single backticks, cut short."""
    text = text.replace("`", "'").replace("\n", " ")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def find_version(name: str) -> str:
    try:
        return f" {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def describe_commit() -> str:
    """Returns the commit of this checkout, and whether files were changed since."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "an unknown commit"
