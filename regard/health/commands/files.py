"""Inputs and outputs of the commands: the device, the text, the files written, and why one of them failed."""

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

import regard
from regard.health.models.loading import describe_error, one_line
from regard.health.report import files
from regard.health.report.report import Report
from regard.health.report.terminal import printable
from regard_command import TargetError

PACKAGE = Path(regard.__file__).parent


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is loaded."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="load the weights in this dtype")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, which can run any code")


def check_device(options: argparse.Namespace) -> None:
    """End the command with a usage error if no tensor can be made on `--device` and read."""
    try:
        device = torch.device(options.device)
    except RuntimeError:
        options.fail(f"--device {options.device}: no such kind of device; use cpu, cuda, cuda:1, mps, …")
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:
        options.fail(f"--device {options.device}: {one_line(error)}; --device cpu works everywhere")


def read_text(name: str) -> str:
    """Return the text of a file, or of standard input for "-"."""
    if name != "-":
        return files.read_text(name)
    try:
        text = sys.stdin.read()
        text.encode()  # fails for bytes that are not UTF-8, which arrive as lone surrogates
    except UnicodeError:
        raise ValueError("standard input is not UTF-8 text") from None
    return text


def describe_failure(error: BaseException, what: str) -> str:
    """Return one line: the message alone if regard raised it, else `what` failed, the type and the message."""
    *_, last = traceback.walk_tb(error.__traceback__)
    own = isinstance(error, TargetError) or Path(last[0].f_code.co_filename).is_relative_to(PACKAGE)
    return one_line(error) if own else f"{what}: {describe_error(error)}"


def check_path(options: argparse.Namespace, path: Path, *suffixes: str) -> None:
    """End the command with a usage error if no file, with one of these suffixes if given, can be written to `path`."""
    if suffixes and path.suffix.lower() not in suffixes:
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


def report_failure(command: str, error: Exception, path: Path | None) -> int:
    """Print why the work, or the file at `path`, failed; return the exit status 2."""
    refused = f"{str(path)!r} could not be written: {error.strerror or error}" if isinstance(error, OSError) else ""
    print_error(command, refused or str(error))
    return 2


def print_error(command: str, *messages: str) -> None:
    print(f"regard {command}: {printable('; '.join(messages))}", file=sys.stderr)
