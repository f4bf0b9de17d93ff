"""What both kinds of `regard bench` are asked: where to run, and where to write; checked before minutes of work."""

from __future__ import annotations

import os
from pathlib import Path


def arguments(parser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the GPU where there is one")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the tables there")


def check(options) -> str:
    """The device; a command line that cannot be served ends here."""
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
