"""regard examine MODEL: measure every attention head of a model, report problems, write one HTML file."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from regard.health.commands import files
from regard.health.contract.verdict import FAIL_ON, count_from
from regard.health.examine import examine
from regard.health.models.targets import load_target
from regard.health.report.report import Report
from regard.health.what_if import FORMS, parse_all
from regard.parallel.group import is_first_rank, join_group, local_device

SUFFIXES = (".html", ".json", ".png")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a hub name, hf-tiny:NAME, module:function (returns model, batches), or script.py:trainer",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="text to run the model on; - is standard input (default: a built-in sample)"
    )
    parser.add_argument(
        "--what-if", metavar="CHANGE", action="append", default=[],
        help=f"try a change of the scores: {', '.join(FORMS)}",
    )  # fmt: skip
    parser.add_argument("--length", type=int, help="tokens per sequence (256, or the model's maximum)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per batch (4)")
    parser.add_argument("--limit", type=int, default=64, help="largest number of batches (64)")
    files.add_model_arguments(parser)
    parser.add_argument(
        "--out", metavar="PATH", type=Path, default=Path("report.html"),
        help="output file: .html, .json or .png (report.html)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="PATH", type=Path, help="also write the JSON")
    parser.add_argument("--png", metavar="PATH", type=Path, help="also write the maps as a picture")
    parser.add_argument("--snapshot", metavar="PATH", type=Path, help="save progress here; resume from it if it exists")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds after which a silent rank counts as lost (600)"
    )
    parser.add_argument(
        "--no-checks", action="store_true", help="measure only; no leak, loss, padding or ablation check"
    )
    parser.add_argument("--seconds", type=float, help="time for the checks (20, or 3 times the measurement)")
    parser.add_argument(
        "--fail-on", choices=FAIL_ON, default="never", help="exit with 1 from this severity of finding on (never)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print all: every finding, statistic and reason")
    parser.add_argument("--no-ablation", action="store_true", help="do not measure the loss without each head")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="examine a model whose files lack some weights (they are random)",
    )


def main(options: argparse.Namespace) -> int:
    for name in ("length", "batch", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            options.fail(f"--{name} must be at least 1, got {getattr(options, name)}")
    if not 0 < options.timeout < 1e9:
        options.fail(f"--timeout must be between 0 and 1e9 seconds, got {options.timeout:g}")
    if options.seconds is not None and not options.seconds > 0:
        options.fail(f"--seconds must be above 0, got {options.seconds:g}")
    files.check_path(options, options.out, *SUFFIXES)
    for path, suffix in ((options.json, ".json"), (options.png, ".png")):
        if path is not None:
            files.check_path(options, path, suffix)
    files.check_device(options)
    try:
        parse_all(options.what_if)
    except ValueError as error:
        options.fail(str(error))
    ranks, subject = join_group(options.timeout), None
    wanted = [path for path in (options.out, options.json, options.png) if path is not None]

    def with_notes(report: Report) -> Report:
        return report if subject is None else replace(report, how={**report.how, **subject.notes})

    try:
        subject = load_target(
            options.model, text=None if options.text is None else files.read_text(options.text), length=options.length,
            batch=options.batch, limit=options.limit, device=local_device(options.device), dtype=options.dtype,
            pickle=options.allow_pickle, missing=options.allow_missing,
        )  # fmt: skip
        report = examine(
            subject.model, subject.batches, options.what_if, title=subject.title,
            progress=sys.stderr.isatty() and is_first_rank(), group=ranks, snapshot=options.snapshot,
            tokenizer=subject.tokenizer, checks=not options.no_checks, ablate=False if options.no_ablation else None,
            seconds=options.seconds, predictor=subject.predictor,
            measured=lambda early: files.save_report(with_notes(early), wanted),
        )  # fmt: skip
    except Exception as error:  # whatever the model, its folder or its function raises: one line
        on = f" on {subject.notes['input']}" if subject else ""
        files.print_error("examine", files.describe_failure(error, f"{options.model!r} failed{on}"))
        return 2
    if not is_first_rank():  # another status would make torchrun end rank 0 before it writes the report
        return 0
    report = with_notes(report)
    written, failed = files.save_report(report, wanted)  # before printing, which a closed pipe may end
    report.show(full=options.verbose, page=", ".join(map(str, written)))
    if options.verbose:
        print(*written, sep="\n")
    if "random_weights" in subject.notes:
        files.print_error("examine", subject.notes["random_weights"])
    return _status(report, failed, options.fail_on)


def _status(report: Report, errors: list[str], fail_on: str) -> int:
    """The exit status; prints in one line why it is not 0."""
    if report.interrupted:
        errors = [f"not finished: {report.interrupted}; the report has what was measured", *errors]
    elif not report.heads:
        errors = ["nothing could be measured; the report has the reasons", *errors]
    if errors:
        files.print_error("examine", *errors)
    stopped = report.interrupted is not None and report.interrupted.startswith("KeyboardInterrupt")
    return 130 if stopped else 2 if errors else 1 if count_from(report.findings, fail_on) else 0
