"""regard examine MODEL: look into every attention head of a model, say what is wrong, write one HTML file."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from regard.health import files
from regard.health.examination import examine
from regard.health.loading import LoadError, load
from regard.health.progress import counting
from regard.health.what_if import FORMS, parse_all
from regard.parallel import crew


def arguments(parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a hub name, or module:function that returns (model, batches)"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="text to run it on, - for standard input (default: a built-in sample)"
    )
    parser.add_argument(
        "--what-if", metavar="CHANGE", action="append", default=[], help=f"try a change: {', '.join(FORMS)}"
    )
    parser.add_argument("--length", type=int, help="tokens per sequence (256, or what the model has)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per batch (4)")
    parser.add_argument("--limit", type=int, default=64, help="at most so many batches (64)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="load the weights so")
    parser.add_argument(
        "--out", metavar="PATH", type=Path, default=Path("report.html"), help="report.html; .json and .png too"
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the JSON as well")
    parser.add_argument("--png", metavar="PATH", type=Path, help="write the maps as a picture as well")
    parser.add_argument(
        "--snapshot", metavar="PATH", type=Path, help="keep what was read so far here; go on from it if it is there"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds after which a rank that says nothing is lost (600)"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read weights in pickle, which can run any code")


def main(options) -> int:
    for name in ("length", "batch", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            options.fail(f"--{name} must be at least 1, got {getattr(options, name)}")
    outputs = [path for path in (options.out, options.json, options.png) if path is not None]
    for path in outputs:
        if path.suffix not in (".html", ".json", ".png"):
            options.fail(f"{str(path)!r} must end in .html, .json or .png")
        if not path.parent.is_dir():
            options.fail(f"there is no folder {str(path.parent)!r}")
        if path.is_dir():
            options.fail(f"{str(path)!r} is a folder; name a file in it")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        options.fail(f"--device {options.device}: there is no CUDA device here")
    ranks = crew.join(options.timeout)
    try:
        parse_all(options.what_if)
        subject = load(
            options.model,
            _text(options),
            length=options.length,
            batch=options.batch,
            limit=options.limit,
            device=crew.device(options.device),
            dtype=options.dtype,
            pickle=options.allow_pickle,
        )
        counter = counting("examining", len(subject.batches)) if crew.first() else nullcontext()
        with counter as advance:
            report = examine(
                subject.model,
                subject.batches,
                options.what_if,
                title=subject.title,
                progress=advance,
                group=ranks,
                snapshot=options.snapshot,
            )
    except Exception as error:  # whatever a model, its folder or its function throws: one line, no traceback
        said = str(error).strip().splitlines()
        plain = isinstance(error, (LoadError, ValueError)) and said
        told = said[0] if plain else f"{type(error).__name__}{f': {said[0]}' if said else ''}"
        print(f"regard examine: {told}", file=sys.stderr)
        return 1
    if not crew.first():
        return 0 if report.interrupted is None else 1
    report.show()
    for path in outputs:
        if path.suffix == ".png" and not report.heads:
            print(f"regard examine: no head was measured, so there is no {path}", file=sys.stderr)
        else:
            print(f"{report.save(path)}")
    if report.interrupted:
        print(
            f"regard examine: not finished: {report.interrupted}; what was measured is in the report", file=sys.stderr
        )
        return 130 if report.interrupted.startswith("KeyboardInterrupt") else 1
    if not report.heads:
        print("regard examine: nothing could be measured; the reasons are in the report", file=sys.stderr)
        return 1
    return 0


def _text(options) -> str | None:
    if options.text is None:
        return None
    if options.text == "-":
        return sys.stdin.read()
    return files.read_text(options.text)
