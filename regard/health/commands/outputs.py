"""Output files of the commands: checked before the work, written after it, errors in one line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from regard.health.report.report import Report
from regard.health.report.terminal import printable


def check_path(options: argparse.Namespace, path: Path, *suffixes: str) -> None:
    """End the command with a usage error if a file with one of these suffixes cannot be written to `path`."""
    if path.suffix.lower() not in suffixes:
        several = ", ".join(suffixes[:-1]) + " or " if len(suffixes) > 1 else ""
        options.fail(f"{str(path)!r} must end in {several}{suffixes[-1]}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        options.fail(f"{str(path)!r}: figures need matplotlib: pip install 'regard[report]'")
    if not path.parent.is_dir():
        options.fail(f"there is no folder {str(path.parent)!r}")
    if path.is_dir():
        options.fail(f"{str(path)!r} is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        options.fail(f"the folder {str(path.parent)!r} is not writable")


def save_report(report: Report, paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Write the report: (the files written, why the others were not)."""
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


def print_error(command: str, *messages: str) -> None:
    """Print one line on standard error."""
    print(f"regard {command}: {printable('; '.join(messages))}", file=sys.stderr)
