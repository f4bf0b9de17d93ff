"""regard fingerprint MODEL -o FILE.regard: what a model computes on a few tokens, for another process to be held to."""

import argparse
from pathlib import Path

from regard.health.commands import files
from regard.health.commands.targets import add_target_arguments, load_side
from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.take import fingerprint


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub name, hf-tiny:NAME, module:function, or a dump")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.regard", help="the file to write")
    add_target_arguments(parser)


def main(options: argparse.Namespace) -> int:
    files.check_path(options, options.out, ".regard")
    files.check_device(options)
    try:
        side = load_side(options.model, options)
        taken = side if isinstance(side, Fingerprint) else fingerprint(side.model, side.batches)
        path = taken.save(options.out)
    except Exception as error:  # whatever the model, its folder or its function raises: one line
        files.print_error("fingerprint", files.describe_failure(error, f"{options.model!r} failed"))
        return 2
    print(f"{path}  {path.stat().st_size / 1000:.0f} kB, {len(taken.layers)} layers, {taken.facts['dtype']}")
    return 0
