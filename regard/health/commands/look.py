"""regard look MODEL: which tokens the heads of a model look at, on one text."""

import argparse
import os
from pathlib import Path
from typing import Any

from regard.health.commands import files
from regard.health.look import look
from regard.health.models.loading import is_function
from regard.health.models.targets import load_target

LENGTH = 64  # tokens of the text, unless asked otherwise


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub name, hf-tiny:NAME, or module:function")
    parser.add_argument("--text", metavar="TEXT", help="the text itself, or a file (default: a built-in sample)")
    parser.add_argument("--layer", help="a layer's index or module name (all)")
    parser.add_argument("--head", type=int, help="a head's number (all)")
    parser.add_argument("--rows", metavar="A:B", help="the queries to list, such as 5 or 10:20 (all)")
    parser.add_argument("--top", type=int, default=4, help="keys of each query (4)")
    parser.add_argument("--length", type=int, help=f"tokens of the text ({LENGTH}, or the model's maximum)")
    files.add_model_arguments(parser)
    parser.add_argument("--out", metavar="PATH", type=Path, help="also write an .html file")


def main(options: argparse.Namespace) -> int:
    for name in ("top", "length"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            options.fail(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.out is not None:
        files.check_path(options, options.out, ".html")
    files.check_device(options)
    rows = None if options.rows is None else _parse_rows(options)
    if options.length is None and not is_function(options.model):
        options.length = LENGTH
    layer: Any = options.layer
    layer = int(layer) if layer is not None and layer.isdecimal() else layer
    try:
        is_file = options.text is not None and os.path.isfile(options.text)
        subject = load_target(
            options.model, text=files.read_text(options.text) if is_file else options.text, length=options.length,
            batch=1, limit=1, device=options.device, dtype=options.dtype, pickle=options.allow_pickle,
        )  # fmt: skip
        batch = next(iter(subject.batches))
        seen = look(
            subject.model, batch, layer=layer, head=options.head, rows=rows, top=options.top,
            tokenizer=subject.tokenizer,
        )  # fmt: skip
        if options.out is not None:
            seen.save(options.out)
    except Exception as error:  # whatever the model or its folder raises: one line
        files.print_error("look", files.describe_failure(error, f"{options.model!r} failed"))
        return 2
    print(seen)
    if options.out is not None:
        print(f"\n{options.out}")
    return 0


def _parse_rows(options: argparse.Namespace) -> int | slice:
    try:
        if ":" not in options.rows:
            return int(options.rows)
        first, last = (int(part) if part else None for part in options.rows.split(":"))
        return slice(first, last)
    except ValueError:
        options.fail(f"--rows must be a number or A:B, got {options.rows!r}")
        raise
