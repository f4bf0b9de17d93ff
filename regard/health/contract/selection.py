"""Which rules are checked: `select` and `ignore`, the settings of pyproject.toml, the baseline of known failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regard.health import checks
from regard.health.checks import Finding

SETTINGS: dict[str, Any] = {"select": list, "ignore": list, "fail-on": str, "baseline": str, "seconds": (int, float)}


def choose_rules(select: str | Iterable[str] | None = None, ignore: str | Iterable[str] | None = None) -> set[str]:
    """The codes that `select` names (None: all) without those that `ignore` names.

    >>> from regard.health.contract.selection import choose_rules
    >>> choose_rules("RG10", ignore=["RG102"]) & {"RG101", "RG102", "RG201"}
    {'RG101'}

    Each is a code, the beginning of codes ("RG3"), or a kind of finding ("sees the future"), or several with commas.
    """
    known = set(checks.rules())
    chosen = known if select is None else find_codes("select", select)
    return chosen - (set() if ignore is None else find_codes("ignore", ignore))


def find_codes(argument: str, given: str | Iterable[str]) -> set[str]:
    """The codes of every rule that these words name; raises ValueError for a word that names none."""
    words = [word.strip() for part in ([given] if isinstance(given, str) else given) for word in str(part).split(",")]
    found: set[str] = set()
    for word in filter(None, words):
        own = {
            code for code, rule in checks.rules().items() if code.startswith(word.upper()) or rule.kind == word.lower()
        }
        if not own:
            raise ValueError(f"{argument}: no rule is named {word!r}; `regard rule` lists them")
        found |= own
    return found


def read_settings(folder: Path) -> dict[str, Any]:
    """[tool.regard] of the nearest pyproject.toml, from `folder` upwards; {} if there is none."""
    path = next((one for at in (folder, *folder.parents) if (one := at / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    text = path.read_text(encoding="utf-8")
    if "[tool.regard]" not in text:
        return {}
    if sys.version_info < (3, 11):
        raise ValueError(f"{path}: [tool.regard] needs Python 3.11 or newer; pass the options on the command line")
    import tomllib

    try:
        settings = tomllib.loads(text)["tool"]["regard"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ValueError(f"{path}: [tool.regard] has no setting {name!r}; known: {', '.join(SETTINGS)}")
        if not isinstance(value, SETTINGS[name]):
            raise ValueError(f"{path}: [tool.regard] {name} has the wrong type: {value!r}")
    if "baseline" in settings:
        settings["baseline"] = str(path.parent / settings["baseline"])
    return settings


def read_baseline(path: Path) -> set[tuple[str, str]]:
    """(code, layer) of the failures that are known; raises ValueError if the file is no baseline."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {(one["code"], one["layer"] or "") for one in data["failures"]}
    except FileNotFoundError:
        raise ValueError(f"there is no baseline {str(path)!r}; write it with --write-baseline {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no baseline ({type(error).__name__}: {error}); write it again") from None


def write_baseline(path: Path, found: Iterable[Finding]) -> None:
    """Writes the failures that the next run shall not count."""
    known = [dict(code=one.code, layer=one.layer, kind=one.kind) for one in found]
    path.write_text(json.dumps({"failures": known}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
