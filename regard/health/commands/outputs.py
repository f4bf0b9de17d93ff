"""Where a command writes: checked before the work, written before it is told of, and refused in one line."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from regard.health.report.terminal import printable


def check(options, path: Path, *suffixes: str) -> None:
    """End the command as a bad command line ends if a file of that kind cannot be written there."""
    if path.suffix.lower() not in suffixes:
        several = ", ".join(suffixes[:-1]) + " or " if len(suffixes) > 1 else ""
        options.fail(f"{str(path)!r} must end in {several}{suffixes[-1]}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        options.fail(f"{str(path)!r}: pictures need matplotlib: pip install 'regard[report]'")
    if not path.parent.is_dir():
        options.fail(f"there is no folder {str(path.parent)!r}")
    if path.is_dir():
        options.fail(f"{str(path)!r} is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        options.fail(f"the folder {str(path.parent)!r} cannot be written to")


def save(report, paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Write the report: (the files that are there now, why the others are not). A report of nothing is no picture."""
    written, failed = [], []
    for path in paths:
        if path.suffix.lower() == ".png" and not report.heads:
            failed.append(f"no head was measured, so there is no {str(path)!r}")
            continue
        try:
            written.append(report.save(path))
        except OSError as error:
            failed.append(f"{str(path)!r} could not be written: {error.strerror or error}")
    return written, failed


def complain(command: str, *said: str) -> None:
    """One line on standard error."""
    print(f"regard {command}: {printable('; '.join(said))}", file=sys.stderr)
