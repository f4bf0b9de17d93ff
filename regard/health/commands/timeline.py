"""regard timeline RUN.jsonl …: what monitors saw during trainings, as one HTML file."""

import argparse
from pathlib import Path

from regard.health.commands.files import check_path, report_failure
from regard.health.report import files
from regard.health.report.page.timeline import read_log, render
from regard.table import count_noun


def arguments(parser: argparse.ArgumentParser) -> None:
    text = "what regard.Monitor(model, log='RUN.jsonl') wrote; several are drawn over each other"
    parser.add_argument("logs", type=Path, nargs="+", metavar="RUN.jsonl", help=text)
    parser.add_argument("--out", type=Path, metavar="PATH", help="the page (RUN.html)")


def main(options: argparse.Namespace) -> int:
    out = options.logs[0].with_suffix(".html") if options.out is None else options.out
    check_path(options, out, ".html")
    try:
        names = [path.stem for path in options.logs]
        names = names if len(set(names)) == len(names) else [str(path) for path in options.logs]
        logs = dict(zip(names, map(read_log, options.logs), strict=True))
        files.write(out, render(logs, " · ".join(names)))
    except (ValueError, OSError) as error:
        return report_failure("timeline", error, out)
    for name, log in logs.items():
        before = f"{name}: " if len(logs) > 1 else ""
        incidents = log.incidents()
        for one in incidents:
            until = "" if one["until"] is None else f", resolved at step {one['until']}"
            print(f"{before}step {one['step']}{until}, {one['severity']}: {one['alarm']}: {one['text']}")
        print(f"{before}{count_noun(len(log.samples), 'sample')}, {count_noun(len(incidents), 'incident')}: {out}")
    return 0
