"""regard timeline RUN.jsonl: what a monitor saw during training, as one HTML file."""

import argparse
from pathlib import Path

from regard.health.commands.files import check_path, report_failure
from regard.health.report import files
from regard.health.watching.timeline import read_log, render


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="RUN.jsonl", help="what regard.Monitor(model, log='RUN.jsonl') wrote")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the page (RUN.html)")


def main(options: argparse.Namespace) -> int:
    out = options.log.with_suffix(".html") if options.out is None else options.out
    check_path(options, out, ".html")
    try:
        log = read_log(options.log)
        files.write(out, render(log, options.log.stem))
    except (ValueError, OSError) as error:
        return report_failure("timeline", error, out)
    for alarm in log.alarms:
        print(f"step {alarm['step']}, {alarm['severity']}: {alarm['text']}")
    print(f"{len(log.samples)} samples, {len(log.alarms)} alarms: {out}")
    return 0
