"""`Table`: a table of text, drawn by rich in a terminal, aligned plain text in a pipe, or Markdown.

>>> from regard.table import Table
>>> print(Table(["map", "ms"], [["softmax", "1.5"], ["relu", "12.0"]], numbers=["ms"]).plain())
map        ms
softmax   1.5
relu     12.0
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TextIO

__all__ = ["Table"]

MARKS = {"✓": "green", "✗": "red"}  # colours of cells with these marks in a terminal


def format_number(number: float) -> str:
    """Return three digits of a number: without an exponent from 0.001 up to 100,000, as the report's page shows it.

    >>> from regard.table import format_number
    >>> [format_number(x) for x in (0.06114, 2.7438, 13123.0, 6.618e6, 1.36e-6)]
    ['0.0611', '2.74', '13100', '6.62e6', '1.36e-6']
    """
    rounded = f"{number:.3g}"
    mantissa, exponent, power = rounded.partition("e")
    if not exponent:
        return rounded
    if 1e3 <= abs(float(rounded)) < 1e5:
        return f"{float(rounded):.0f}"
    return f"{mantissa}e{int(power)}"


def count_noun(number: int, noun: str) -> str:
    """`1 head`, `1,024 heads`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass
class Table:
    """Columns and rows of cells, all strings; `numbers` names the right-aligned columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    numbers: Sequence[str] = field(default_factory=tuple)

    def show(self, file: TextIO | None = None) -> None:
        """Print the table: with rich if `file` (default standard output) is a terminal, as plain text otherwise."""
        file = sys.stdout if file is None else file
        if file.isatty():
            self._draw(file)
        else:
            print(self.plain(), file=file)

    def plain(self) -> str:
        """Return aligned text for pipes and files: two spaces between columns, nothing cut."""
        lines = [list(self.columns), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(self._align, line, widths, self.columns)).rstrip() for line in lines]
        return "\n".join([self.title, *text] if self.title else text)

    def markdown(self) -> str:
        """Return a Markdown table under its title."""
        rules = ["---:" if column in self.numbers else "---" for column in self.columns]
        lines = [list(self.columns), rules, *self.rows]
        text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([f"## {self.title}", "", *text] if self.title else text)

    def _align(self, cell: str, width: int, column: str) -> str:
        return cell.rjust(width) if column in self.numbers else cell.ljust(width)

    def _draw(self, file: TextIO) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        drawn = RichTable(title=Text(self.title) if self.title else None, box=box.SIMPLE_HEAD, title_justify="left")
        for index, column in enumerate(self.columns):
            justify: Literal["left", "right"] = "right" if column in self.numbers else "left"
            drawn.add_column(Text(column), justify=justify, style="bold" if index == 0 else "", overflow="fold")
        for row in self.rows:
            drawn.add_row(*(Text(cell, style=_find_colour(cell)) for cell in row))
        Console(file=file).print(drawn)


def _find_colour(cell: str) -> str:
    """Return the colour of the last mark in a cell, or none."""
    return next((colour for mark, colour in reversed(MARKS.items()) if mark in cell), "")
