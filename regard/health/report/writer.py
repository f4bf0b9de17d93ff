"""`Writer`: the one way in which reports reach a terminal: wrapped, with hanging indents, coloured only there."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

WIDTH = 80  # where the file is no terminal


def printable(text: str) -> str:
    """`text` with control characters escaped, which a terminal would obey.

    >>> from regard.health.report.writer import printable
    >>> printable("layer\\x1b[31m")
    'layer\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fold_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs folded.

    >>> from regard.health.report.writer import fold_numbers
    >>> fold_numbers([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


class Writer:
    """Prints lines of text to a file, standard output if None, and counts them."""

    LABEL = 10  # columns of a field's name

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = sys.stdout if file is None else file
        self.is_terminal = self.file.isatty()
        self.width, self.height = WIDTH, 0
        if self.is_terminal:
            from rich.console import Console

            self._console = Console(file=self.file, highlight=False, markup=False, emoji=False, soft_wrap=True)
            self.width, self.height = max(min(self._console.width, 100), 60), self._console.height
        self.lines = 0

    def line(self, text: str = "", style: str = "", most: int = 0, hanging: int = 2) -> None:
        """Prints a text, wrapped at words with a hanging indent; at most `most` lines of it, 0 for all."""
        parts = self.wrap(text, hanging, most) or [""]
        for part in parts:
            self.lines += 1
            if self.is_terminal:
                from rich.text import Text

                self._console.print(Text(part, style=style), soft_wrap=True)
            else:
                print(self._encodable(part), file=self.file)

    def field(self, name: str, text: str, most: int = 2) -> None:
        """Prints `name  text` in at most so many lines; nothing if the text is empty."""
        for line, style in self.list_field(name, text, most, indent=0):
            self.line(line, style)

    def list_field(self, name: str, text: str, most: int = 2, indent: int = 4) -> Iterator[tuple[str, str]]:
        """Lines `name  text` without style, later ones under the text; none if the text is empty or `most` is 0."""
        label = f"{' ' * indent}{name:<{self.LABEL}}"
        if text and most:
            yield from ((line, "") for line in self.wrap(label + printable(text), len(label), most, len(label)))

    def wrap(self, text: str, hanging: int, most: int = 0, start: int = 0) -> list[str]:
        """The lines of a text whose first `start` columns stay as they are.

        What does not fit into `most` lines is cut behind the last clause that does, else behind a word, with a …
        """
        text = printable(text)
        start = start or len(text) - len(text.lstrip())
        options: dict[str, Any] = dict(
            width=self.width, initial_indent=text[:start], subsequent_indent=" " * hanging,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        lines = textwrap.wrap(text[start:].strip(), **options)
        if not most or len(lines) <= most:
            return lines
        cut = textwrap.wrap(text[start:].strip(), max_lines=most, placeholder=" …", **options)
        kept = " ".join([cut[0][start:], *(line.strip() for line in cut[1:])])
        clause = max(kept.rfind(mark) for mark in (". ", "; ", " ("))
        if clause * 2 < len(kept):
            return cut
        return textwrap.wrap(f"{kept[: clause + 1].rstrip('; ')} …", **options)

    def _encodable(self, text: str) -> str:
        """The text, with ? for what the file's encoding lacks."""
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        return text.encode(encoding, errors="replace").decode(encoding)
