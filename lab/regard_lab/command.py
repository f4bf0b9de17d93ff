"""The command `regard lab [CLAIM …]`: run the claims, print the verdicts, write lab.html."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.health.commands.files import check_path
from regard.health.report import files
from regard.table import Table
from regard_lab.run import Result, check_name, names, run_all

MARKS = {"holds": "✓ holds", "holds_if": "≈ holds if", "wrong": "✗ wrong"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="ids to run; all without")
    parser.add_argument("--seed", type=int, default=0, help="of every experiment (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON, write no page")
    parser.add_argument("--html", metavar="PATH", help="where the page goes (default lab.html when all claims run)")


def main(options: argparse.Namespace) -> int:
    """Run the chosen claims; return 1 if an experiment failed."""
    options.claims = list(dict.fromkeys(options.claims))  # without duplicates
    for name in options.claims:
        try:
            check_name(name)
        except ValueError as unknown:
            options.fail(str(unknown))
    if not 0 <= options.seed < 2**31:
        options.fail(f"--seed must lie in [0, 2**31), got {options.seed}")
    path = options.html
    if path is None and not options.json and not options.claims:
        path = "lab.html"
    if path is not None:
        check_path(options, Path(path))
    results, failures = [], []
    for name, outcome in _show_progress(options.claims or names(), options.seed):
        if isinstance(outcome, Result):
            results.append(outcome)
        else:
            failures.append(f"{name}: {type(outcome).__name__}: {outcome}")
    _print(results, options)
    if path is not None and results:
        from regard_lab.page import page

        try:
            files.write(path, page(results, options.seed))
        except OSError as refused:
            options.fail(f"--html {path} cannot be written: {refused.strerror}")
        print(f"wrote {path}", file=sys.stderr)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _print(results: list[Result], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([result.to_dict() for result in results], ensure_ascii=False, indent=2))
    elif len(options.claims) == 1:
        print("\n\n".join(describe(result) for result in results))
    else:
        table(results).show()
        print(summary(results))


def table(results: list[Result]) -> Table:
    """Return the verdicts, one row per claim."""
    rows = [
        [result.claim.id, MARKS[result.verdict], check.allowed, repr(check.measured), check.what]
        for result in results
        for check in [result.finding.checks[0]]
    ]
    return Table(["claim", "verdict", "predicted", "measured [interval]", "what"], rows)


def summary(results: list[Result]) -> str:
    """Return how many claims have each verdict."""
    counts = [f"{sum(r.verdict == verdict for r in results)} {name}" for verdict, name in MARKS.items()]
    return f"{len(results)} claims: {', '.join(counts)}"


def describe(result: Result) -> str:
    """Return one claim in full, as text."""
    claim, finding = result.claim, result.finding

    def paragraph(label: str, text: str) -> str:
        return textwrap.fill(f"{label}{text}", 100, subsequent_indent=" " * len(label))

    lines = [f"{claim.id}: {MARKS[result.verdict]}", ""]
    lines.append(paragraph("claim      ", f"{claim.statement} (note {claim.note})"))
    lines += [f"{'derivation' if i == 0 else '':11}{line}" for i, line in enumerate(claim.derivation)]
    lines += [paragraph("rule       ", claim.rule), ""]
    checks = [
        [check.what, check.allowed, repr(check.measured), "✓ agrees" if check.agrees else "✗ disagrees", check.role]
        for check in finding.checks
    ]
    lines += [Table(["check", "predicted", "measured [interval]", "outcome", "part"], checks).plain(), ""]
    remarks = {"holds if   ": result.condition, "right      ": result.right, "remark     ": finding.remark}
    lines += [paragraph(label, text) for label, text in remarks.items() if text]
    return "\n".join(lines)


def _show_progress(chosen: Sequence[str], seed: int) -> Iterator[tuple[str, Result | Exception]]:
    outcomes = run_all(chosen, seed)
    if not sys.stderr.isatty():
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(outcomes, "running", total=len(chosen), console=Console(stderr=True), transient=True)
