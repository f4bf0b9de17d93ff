"""`python -m bench [rows | attention | small]`: times against torch and others on this machine.

Every case runs its candidates alternately, round after round, and compares medians within the run, because a busy
machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import measure
from regard.table import Table

PARTS = ("rows", "attention", "small")
IDLE = 0.5  # load average, at most, of a quiet machine


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of them; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, for a rough result")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shared_arguments(parser)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --device and --markdown, which `python -m bench accuracy` has too."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the GPU where there is one")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the tables there")


def main(options: argparse.Namespace) -> int:
    """Run the cases and print their table; return 1 if regard failed in one of them."""
    device = choose_device(options)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    results = {part: run(part, device, options.quick) for part in PARTS if options.part in (None, part)}
    machine = measure.machine(device) | {"load before": f"{load:.2f}"}
    tables = [measure.table(found, f"regard bench {part}, {device}") for part, found in results.items()]
    if options.json:
        listed = {part: [result.as_dict() for result in found] for part, found in results.items()}
        print(json.dumps({"machine": machine, **listed}, ensure_ascii=False, indent=2))
    else:
        for table in tables:
            table.show()
        print("; ".join(f"{key} {value}" for key, value in machine.items()))
    words = [word for word in (options.part, options.quick and "--quick") if word]
    write_page(options, " ".join(["regard bench", *words]), machine, tables)
    if load > IDLE:
        print(f"the load average was {load:.2f} at the start; repeat on a quiet machine", file=sys.stderr)
    failures = [result for found in results.values() for result in found if "regard" in result.failures]
    for result in failures:
        print(f"{result.work}: {result.failures['regard']}", file=sys.stderr)
    return 1 if failures else 0


def run(part: str, device: str, quick: bool) -> list[measure.Result]:
    """Measure the cases of one of `PARTS`."""
    from bench import attention, rows, small

    cases = {"rows": rows, "attention": attention, "small": small}[part].cases(device, quick)
    return measure.run(cases, device, rounds=3 if quick else 15, label=part)


def choose_device(options: argparse.Namespace) -> str:
    """Return the device; end the command before any work if an option cannot be used."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        options.fail("argument --device: torch finds no CUDA device here; use --device cpu")
    page = options.markdown
    if page is not None:
        if not page.parent.is_dir():
            options.fail(f"argument --markdown: no folder {str(page.parent)!r}; make it first")
        if page.is_dir():
            options.fail(f"argument --markdown: {str(page)!r} is a folder; name a file in it")
        if not os.access(page if page.exists() else page.parent, os.W_OK):
            options.fail(f"argument --markdown: {str(page)!r} cannot be written")
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def write_page(options: argparse.Namespace, command: str, machine: dict[str, str], tables: Sequence[Table]) -> None:
    """Write the machine and the tables of a command to the file of --markdown, if there is one."""
    if options.markdown is not None:
        about = [f"- {key}: {value}" for key, value in machine.items()]
        text = [f"# `{command}`", "", *about, *(f"\n{table.markdown()}" for table in tables)]
        options.markdown.write_text("\n".join(text) + "\n", encoding="utf-8")
