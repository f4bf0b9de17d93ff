"""Options that `regard bench` and `regard bench accuracy` share, and the page they write."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from regard.table import Table


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add --device and --markdown."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the GPU where there is one")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the tables there")


def check(options: argparse.Namespace) -> str:
    """Return the device; end the command before any work if an option cannot be used."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        options.fail("argument --device: torch finds no CUDA device here; use --device cpu")
    page = options.markdown
    if page is not None:
        if not page.parent.is_dir():
            options.fail(f"argument --markdown: no folder {str(page.parent)!r}; make it first")
        if page.is_dir():
            options.fail(f"argument --markdown: {str(page)!r} is a folder; name a file in it")
        if not os.access(page if page.exists() else page.parent, os.W_OK):
            options.fail(f"argument --markdown: {str(page)!r} cannot be written")
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def write_page(path: Path, command: str, machine: Mapping[str, str], tables: Sequence[Table]) -> None:
    """Write the machine and the tables of a command as Markdown."""
    about = [f"- {key}: {value}" for key, value in machine.items()]
    text = [f"# `{command}`", "", *about, *(f"\n{table.markdown()}" for table in tables)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
