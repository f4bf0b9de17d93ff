"""Inputs of the commands: the device, the text and the model, and why one of them failed."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import torch

import regard
from regard.health.models.loading import describe_error, is_function, one_line
from regard.health.report import files

PACKAGE = Path(regard.__file__).parent


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


def announce_hub(model: str) -> None:
    """Print that the hub is asked, which can take half a minute without a network; only to a terminal."""
    if sys.stderr.isatty() and not is_function(model) and not Path(model).exists():
        print(f"there is no folder {model!r} here; asking the hub for a model of that name …", file=sys.stderr)


def describe_failure(error: BaseException, what: str) -> str:
    """Return one line: the message alone if regard raised it, else `what` failed, the type and the message."""
    *_, last = traceback.walk_tb(error.__traceback__)
    own = Path(last[0].f_code.co_filename).is_relative_to(PACKAGE)
    return one_line(error) if own else f"{what}: {describe_error(error)}"
