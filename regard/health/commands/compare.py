"""regard compare A.json B.json: what differs between two reports, in the terminal and as one HTML file."""

import argparse
from pathlib import Path

from regard.health.commands.files import check_path, report_failure
from regard.health.report.comparison import compare


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument("--heads", type=int, default=5, help="how many of the most changed heads to list (5)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="also write both side by side to an .html file")


def main(options: argparse.Namespace) -> int:
    if options.out is not None:
        check_path(options, options.out, ".html")
    if options.heads < 0:
        options.fail(f"--heads must be at least 0, got {options.heads}")
    try:
        comparison = compare(options.a, options.b)
        if options.out is not None:
            comparison.save(options.out, options.heads)
    except (ValueError, OSError) as error:
        return report_failure("compare", error, options.out)
    comparison.show(heads=options.heads)
    if options.out is not None:
        print(f"\n{options.out}")
    return 0
