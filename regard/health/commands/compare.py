"""regard compare A B: what differs between two models, fingerprints or dumps, or between two reports.

Exit status 0 if nothing differs by more than rounding, 1 if something does, 2 for bad input. Two reports: 0 if B is
the same as A or better, 1 if it is worse or neither, 2 if one of them was not finished.
"""

import argparse
import json
from pathlib import Path

from regard.health.commands import files
from regard.health.commands.targets import Loaded, add_target_arguments, is_report, load_side
from regard.health.comparing.models import compare_sides
from regard.health.comparing.result import ModelComparison
from regard.health.report.comparison import compare

STATUS = dict(same=0, better=0, worse=1, different=1, unknown=2)


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "a model (folder, hub name, hf-tiny:NAME, module:function), a .regard file, a folder of tensors, a report"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="the same; the other model is run on a fingerprint's tokens")
    parser.add_argument("--tolerance", type=float, help="relative difference that counts (None: beyond rounding)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--heads", type=int, default=3, help="of reports: how many changed heads to list (3)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="also write the comparison to an .html file")
    add_target_arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.out is not None:
        files.check_path(options, options.out, ".html")
    if options.heads < 0:
        options.fail(f"--heads must be at least 0, got {options.heads}")
    if options.tolerance is not None and not 0.0 <= options.tolerance < float("inf"):
        options.fail(f"--tolerance must be a number from 0 on, got {options.tolerance}")
    if is_report(options.a) and is_report(options.b):
        return _compare_reports(options)
    files.check_device(options)
    try:
        found = _compare(options)
        if options.out is not None:
            found.save(options.out)
    except Exception as error:  # whatever a model, its folder or its function raises: one line
        files.print_error("compare", files.describe_failure(error, "it failed"))
        return 2
    if options.json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False))
    else:
        found.show()
    return 0 if found.same else 1


def _compare(options: argparse.Namespace) -> ModelComparison:
    for one, other in ((options.a, options.b), (options.b, options.a)):
        if is_report(one):
            raise ValueError(f"{one!r} is a report and {other!r} is none; compare two of a kind")
    sides = [load_side(target, options) for target in (options.a, options.b)]
    given = next((side.batches for side in sides if isinstance(side, Loaded)), None)
    both = all(isinstance(side, Loaded) for side in sides)
    models = [side.model if isinstance(side, Loaded) else side for side in sides]
    return compare_sides(models[0], models[1], given if both else None, options.tolerance)


def _compare_reports(options: argparse.Namespace) -> int:
    try:
        comparison = compare(Path(options.a), Path(options.b), tolerance=options.tolerance)
        if options.out is not None:
            comparison.save(options.out, options.heads)
    except (ValueError, OSError) as error:
        return files.report_failure("compare", error, options.out)
    comparison.show(heads=options.heads)
    if options.out is not None:
        print(f"page: {options.out}")
    return STATUS[comparison.verdict[0]]
