"""regard examine MODEL: look into every attention head of a model, say what is wrong, write one HTML file."""

from __future__ import annotations

import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

import regard
from regard.health.commands.outputs import check, complain, save
from regard.health.commands.progress import counting
from regard.health.examine import examine
from regard.health.models.loading import load, one_line, told
from regard.health.report import files
from regard.health.what_if import FORMS, parse_all
from regard.parallel import torchrun

PACKAGE = Path(regard.__file__).parent
KINDS = (".html", ".json", ".png")


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
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="examine a model although some weights are random, not in its files",
    )


def main(options) -> int:
    for name in ("length", "batch", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            options.fail(f"--{name} must be at least 1, got {getattr(options, name)}")
    if not 0 < options.timeout < 1e9:
        options.fail(f"--timeout must be seconds, more than 0 and less than 1e9, got {options.timeout:g}")
    check(options, options.out, *KINDS)
    for path, suffix in ((options.json, ".json"), (options.png, ".png")):
        if path is not None:
            check(options, path, suffix)
    _check_device(options)
    try:
        parse_all(options.what_if)
    except ValueError as error:
        options.fail(str(error))
    ranks, subject = torchrun.join_group(options.timeout), None
    try:
        subject = load(
            options.model,
            _text(options),
            length=options.length,
            batch=options.batch,
            limit=options.limit,
            device=torchrun.local_device(options.device),
            dtype=options.dtype,
            pickle=options.allow_pickle,
            missing=options.allow_missing,
        )
        counter = counting("examining", subject.many) if torchrun.is_first_rank() else nullcontext()
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
        on = f" on {subject.notes['input']}" if subject else ""
        complain("examine", one_line(error) if _is_ours(error) else f"{options.model!r} failed{on}: {told(error)}")
        return 1
    if not torchrun.is_first_rank():  # torchrun would end rank 0 at a status of 1, before the report is written
        return 0
    report = replace(report, how={**report.how, **subject.notes})
    wanted = [path for path in (options.out, options.json, options.png) if path is not None]
    written, failed = save(report, wanted)  # before the view, which a closed pipe may end
    report.show()
    for path in written:
        print(path)
    if "random_weights" in subject.notes:
        complain("examine", subject.notes["random_weights"])
    return _status(report, failed)


def _status(report, said: list[str]) -> int:
    """The exit status, and in one line why it is not 0."""
    if report.interrupted:
        said = [f"not finished: {report.interrupted}; what was measured is in the report", *said]
    elif not report.heads:
        said = ["nothing could be measured; the reasons are in the report", *said]
    if said:
        complain("examine", *said)
    stopped = report.interrupted is not None and report.interrupted.startswith("KeyboardInterrupt")
    return 130 if stopped else 1 if said else 0


def _is_ours(error: BaseException) -> bool:
    """Was it raised in this package, and not by the model?"""
    *_, last = traceback.walk_tb(error.__traceback__)
    return Path(last[0].f_code.co_filename).is_relative_to(PACKAGE)


def _check_device(options) -> None:
    try:
        torch.zeros(1, device=options.device).item()
    except Exception as error:
        options.fail(f"--device {options.device}: {one_line(error)}")


def _text(options) -> str | None:
    if options.text is None:
        return None
    if options.text == "-":
        try:
            text = sys.stdin.read()
            text.encode()  # bytes that are no UTF-8 come as lone surrogates, or not at all
        except UnicodeError:
            raise ValueError("standard input is not UTF-8 text") from None
        return text
    return files.read_text(options.text)
