"""The command `regard list`: every registered normaliser, described by its own file.

>>> from regard.listing import rows
>>> rows()["softmax1"]["sums_to"]
'< 1'
"""

from __future__ import annotations

import argparse
import json

from regard import normalizers
from regard.table import Table

FIELDS = ("name", "formula", "sums_to", "sparse", "family", "parameter", "fused", "use_when", "paper")


def rows() -> dict[str, dict]:
    """Return name → the `FIELDS` of its record."""
    listed = {}
    for name in normalizers.names():
        member = normalizers.get(name).normalizer
        listed[name] = {field: getattr(member, field) for field in FIELDS}
        listed[name]["family"] = member.family or "reference only"
        if member.parameter:
            listed[name]["parameter"] = {"name": member.parameter.name, "default": member.parameter.default}
    return listed


def table() -> Table:
    """Return one line per normaliser."""
    cells = [
        [row["name"], row["formula"], row["sums_to"], "yes" if row["sparse"] else "no", row["use_when"], row["paper"]]
        for row in rows().values()
    ]
    return Table(["name", "weights p", "rows sum to", "sparse", "use when", "paper"], cells)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> None:
    """Print the table, or JSON."""
    if options.json:
        print(json.dumps(list(rows().values()), ensure_ascii=False, indent=2))
    else:
        table().show()
