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
LONGEST = 260  # characters of what regard says


def summarise(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns for each tool what is counted; the rivals' words are not judged for the cause."""
    found, named = sum(row["found"] for row in rows), sum(row["named"] for row in rows)
    alarms = sum(bool(row["false_alarms"]) for row in rows)
    table = {"regard": [share(found, rows), share(named, rows), share(alarms, rows), "0"]}
    for name in rows[0]["rivals"] if rows else ():
        own = [row["rivals"][name] for row in rows]
        found, alarms = (sum(bool(one[part]) for one in own) for part in ("says", "false_alarms"))
        table[name] = [share(found, rows), "–", share(alarms, rows), str(sum(bool(one["stopped"]) for one in own))]
    return table


def share(count: int, rows: list[dict[str, Any]]) -> str:
    return f"{count} of {len(rows)} ({count / max(len(rows), 1):.0%})"


def make_page(rows: list[dict[str, Any]], count: int | None = None) -> str:
    """Returns the Markdown of the whole page; `count`: the museum's bugs, if not all were scored."""
    missing = 0 if count is None else count - len(rows)
    left = f" {missing} more bugs of the museum were not scored in this run." if missing > 0 else ""
    head = "| tool | " + " | ".join(COUNTED) + " |\n| --- | ---: | ---: | ---: | ---: |\n"
    board = "\n".join(f"| {name} | {' | '.join(counts)} |" for name, counts in summarise(rows).items())
    used = list(rows[0]["rivals"]) if rows else []
    about = "\n".join(f"- {name}{find_version(name)}: {ABOUT[name]}." for name in used)
    gallery = "\n".join(map(show_bug, rows))
    return f"""# The museum of attention bugs

{len(rows)} public bugs of attention, each made again as a small patch of a small model in `museum/`, beside the same
model without it. `python -m museum` checks both and prints this scoreboard; `python -m museum SLUG` one of them. Each
tool is given the model and its batches, and nothing else.{left}

*Found*: a failure that the sound twin does not have. *Named*: its line has a word of the cause (`NEEDS` in the bug's
file); what rivals say is not judged. An alarm on a sound twin counts whatever it says. Those who wrote the checks knew
these bugs, so that regard's rate here is not one of unseen bugs.

{head}{board}

{about}

Made by `python -m museum --page docs/museum.md` at {describe_commit()}. The second part is
[the calibration](records/calibration.md): made-up bugs in trained models, held out by halves.

{gallery}
"""


def show_bug(row: dict[str, Any]) -> str:
    """Returns a section: the bug, where it was reported, its symptom, what regard says, which rivals found it."""
    repository, _, number = row["link"].partition("#")
    others = ", ".join(name for name, one in row["rivals"].items() if one["says"])
    state = "" if row["named"] else " (found, the cause not named)" if row["found"] else " (missed)"
    says = f"`{quote(row['says'][0])}`" if row["says"] else "nothing"
    return f"""## {row["slug"].replace("_", " ")}

{escape(row["title"], quote=False)} [{row["link"]}](https://github.com/{repository}/issues/{number})

- Symptom: {escape(row["symptom"], quote=False)}
- regard{state}: {says}
- Rivals that find it: {others or "none"}
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
