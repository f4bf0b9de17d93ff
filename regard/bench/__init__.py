"""regard bench [rows | attention]: how fast, against what torch and others give on this machine.

Every case runs its candidates in turns, round after round, and compares medians within the run: a busy machine slows
all of them alike. Ratios stand beside the targets that the project set itself, and whether they were reached.
"""

from __future__ import annotations

import json
import sys

from regard.bench import measure
from regard.bench import options as asked
from regard.bench.busy import ALLOWED, Others

PARTS = ("rows", "attention")


def arguments(parser) -> None:
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of them; both by default")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked.arguments(parser)


def main(options) -> int:
    device = asked.check(options)
    others = Others()
    results = {part: run(part, device, options.quick) for part in PARTS if options.part in (None, part)}
    cores = others.cores()
    machine = measure.machine(device) | {"other processes": "unknown" if cores is None else f"{cores:.2f} cores"}
    if options.json:
        listed = {part: [result.as_dict() for result in found] for part, found in results.items()}
        print(json.dumps({"machine": machine, **listed}, ensure_ascii=False, indent=2))
    tables = [measure.table(found, f"regard bench {part}, {device}") for part, found in results.items()]
    if not options.json:
        for table in tables:
            table.show()
        print("; ".join(f"{key} {value}" for key, value in machine.items()))
    if options.markdown is not None:
        text = [f"- {key}: {value}" for key, value in machine.items()]
        command = "regard bench " + " ".join(word for word in (options.part, options.quick and "--quick") if word)
        text = [f"# `{command.strip()}`", "", *text, *(f"\n{table.markdown()}" for table in tables)]
        options.markdown.write_text("\n".join(text) + "\n", encoding="utf-8")
    if cores is not None and cores > ALLOWED:
        print(f"other processes kept {cores:.2f} cores busy: repeat on a quiet machine", file=sys.stderr)
    failures = [result for found in results.values() for result in found if "regard" in result.failures]
    for result in failures:
        print(f"{result.work}: {result.failures['regard']}", file=sys.stderr)
    return 1 if failures else 0


def run(part: str, device: str, quick: bool) -> list[measure.Result]:
    from regard.bench import attention, rows

    cases = {"rows": rows, "attention": attention}[part].cases(device, quick)
    return measure.run(cases, device, rounds=3 if quick else 15, label=part)
