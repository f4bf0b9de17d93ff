"""The command `regard`: a target that does not exist, and Ctrl-C, end it in one line, before torch is imported.

Importing torch takes seconds; what can be told without it is told here.

>>> from regard_command import main
>>> main(["check", "./no-such-folder"])
2
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

TARGETS = {"check": 1, "examine": 1, "look": 1, "fingerprint": 1, "compare": 2}  # command -> targets, which come first
TINY = "hf-tiny:"
SCRIPT = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
FILES = (".regard", ".safetensors", ".json", ".html")  # what `regard compare` takes besides models
WAIT = 1.2  # seconds for the hub to say whether a model exists


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line as `regard.cli.main` does, after a look at its targets; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    command, *rest = given or [""]
    try:
        for target in list(takewhile(lambda one: not one.startswith("-"), rest))[: TARGETS.get(command, 0)]:
            require_target(target)
        from regard.cli import main as run

        return run(given)
    except TargetError as error:
        print(f"regard {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class TargetError(Exception):
    """Says in one line why a target cannot be used, and what to do."""


@cache
def require_target(spec: str) -> None:
    """Raises TargetError, within two seconds, for a target that does not exist."""
    if not spec.strip():
        raise TargetError("the target is empty; pass a folder, a hub name, hf-tiny:NAME or module:function")
    script = SCRIPT.fullmatch(spec)
    if script is not None:
        if not Path(script["path"]).is_file():
            raise TargetError(f"there is no file {script['path']!r}")
    elif spec.startswith(TINY) or os.path.exists(spec):
        return
    elif ":" in spec:
        _require_module(spec.partition(":")[0], spec)
    elif spec.endswith(FILES):
        raise TargetError(f"there is no file {spec!r}")
    elif HUB_NAME.fullmatch(spec) and not spec.startswith("."):
        require_on_hub(spec)
    else:
        raise TargetError(f"there is no folder {spec!r}; pass a folder, a hub name, hf-tiny:NAME or module:function")


def _require_module(name: str, spec: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        is_there = bool(name) and _is_installed(name.split(".")[0])
    finally:
        sys.path.pop(0)
    if not is_there:
        raise TargetError(f"{spec!r}: there is no module {name!r} in this folder or installed; write module:function")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require_on_hub(name: str) -> None:
    """Asks the cache, then the hub, for WAIT seconds at most; an unclear answer is left to loading."""
    if not _is_installed("transformers"):
        raise TargetError('a hub name needs transformers: pip install "regard[hf]"')
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE

    if (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return
    otherwise = "pass a folder, or hf-tiny:NAME for an architecture with random weights"
    if HF_HUB_OFFLINE:
        raise TargetError(f"there is no folder {name!r}, and the hub is switched off (HF_HUB_OFFLINE); {otherwise}")
    answer: list[str] = []

    def ask() -> None:
        request = urllib.request.Request(f"{ENDPOINT}/api/models/{name}", method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=WAIT).close()
            answer.append("")
        except urllib.error.HTTPError as error:
            answer.append("the hub has no model of that name" if error.code == 404 else "")
        except OSError as error:
            reason = getattr(error, "reason", error)
            answer.append("" if isinstance(reason, TimeoutError) else f"the hub cannot be reached ({reason})")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WAIT)
    if answer and answer[0]:
        raise TargetError(f"there is no folder {name!r}, and {answer[0]}; {otherwise}")
