"""regard check TARGET: the contract of attention, red or green: one line per failure and an exit status."""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from regard.health.contract.verdict import FAIL_ON
from regard.health.models.targets import load_target


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET",
        help="a folder, a hub name, hf-tiny:NAME, module:function (returns model, batches), or script.py:trainer",
    )  # fmt: skip
    parser.add_argument("--fail-on", choices=FAIL_ON, help="the gravest severity that is let pass ends here (warning)")
    parser.add_argument("--json", action="store_true", help="print JSON: a short summary first, then everything")
    parser.add_argument("--select", action="append", metavar="CODES", help="check only these: RG1,RG401 (all)")
    parser.add_argument("--ignore", action="append", metavar="CODES", help="leave these out")
    parser.add_argument("--baseline", metavar="FILE", type=Path, help="known failures, which do not count")
    parser.add_argument("--write-baseline", metavar="FILE", type=Path, help="write the failures found to this file")
    parser.add_argument("--notes", action="store_true", help="print notes too")
    parser.add_argument("--seconds", type=float, help="after which no further check begins (60)")
    parser.add_argument("--text", metavar="FILE", help="text to run the model on (default: a built-in sample)")
    parser.add_argument("--length", type=int, help="tokens per sequence (256, or the model's maximum)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="load the weights in this dtype")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, which can run any code")
    parser.add_argument("--allow-missing", action="store_true", help="check a model whose files lack some weights")


def main(options: argparse.Namespace) -> int:
    from regard.health.commands import files
    from regard.health.contract import selection
    from regard.health.contract.check import check
    from regard.health.contract.run import SECONDS
    from regard.health.contract.verdict import count_from, describe

    files.check_device(options)
    try:
        settings = selection.read_settings(Path.cwd())
        select, ignore = options.select or settings.get("select"), options.ignore or settings.get("ignore")
        selection.choose_rules(select, ignore)
        baseline = options.baseline or settings.get("baseline")
        known = selection.read_baseline(Path(baseline)) if baseline else set()
        fail_on = options.fail_on or settings.get("fail-on", "warning")
        seconds = settings.get("seconds", SECONDS) if options.seconds is None else options.seconds
        count_from([], fail_on)
    except ValueError as error:
        return _refuse(str(error))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what scripts print does not belong into the verdict
            subject = load_target(
                options.target, text=None if options.text is None else files.read_text(options.text),
                length=options.length, batch=4, limit=8, device=options.device, dtype=options.dtype,
                pickle=options.allow_pickle, missing=options.allow_missing,
            )  # fmt: skip
            verdict = check(
                subject.predictor or subject.model, subject.batches, select, ignore, tokenizer=subject.tokenizer,
                title=subject.title, seconds=seconds, trained=subject.trained, progress=sys.stderr.isatty(),
            )  # fmt: skip
    except Exception as error:  # whatever the model, its folder or its function raises: one line
        return _refuse(files.describe_failure(error, options.target))
    verdict = verdict.without(known)
    if options.write_baseline is not None:
        selection.write_baseline(options.write_baseline, [*verdict.failures, *verdict.known])
    if options.json:
        print(json.dumps(verdict.to_json(), ensure_ascii=False, indent=1, allow_nan=False))
    else:
        *lines, summary = verdict.lines()
        notes = [describe(one) for one in verdict.notes] if options.notes else []
        print("\n".join(map(files.printable, [*lines, *notes, summary])))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print("\n".join(annotate(one) for one in verdict.failures))
    return 1 if count_from(verdict.failures, fail_on) else 2 if verdict.error else 0


def annotate(one: Any) -> str:
    """A failure as GitHub shows it beside a pull request."""
    level = "error" if one.severity == "critical" else "warning"
    text = f"{one.evidence} Likely cause: {one.cause} Fix: {one.fix}"
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(character, code)
    return f"::{level} title={one.code} {one.kind} in {one.layer or 'the whole model'}::{text}"


def _refuse(reason: str) -> int:
    """Prints in one line why nothing was checked; returns the status of bad usage."""
    print(f"regard check: {' '.join(reason.split())}", file=sys.stderr)
    return 2
