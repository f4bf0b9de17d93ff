"""The first screen of `regard demo` as a picture: docs/figures/screen.svg.

python docs/figures/screen.py        (make figures)
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from regard.health.checks.rule import SEVERITIES
from regard.health.commands.demo import CHANGES
from regard.health.examine import examine
from regard.health.models import inputs, tiny

FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's point to a server; a reader's own monospace serves


class Terminal(io.StringIO):
    """A text file that takes colours."""

    def isatty(self) -> bool:
        return True


def main() -> None:
    model, _ = tiny.checkpoint("tiny-unscaled")
    texts = tiny.batches(inputs.sample_text(), model.options["length"], 8)
    report = examine(
        model, texts, CHANGES, title="tiny-unscaled, without 1/√d", tokenizer=tiny.CHARACTERS.__getitem__, ablate=False
    )
    assert report.diagnosis[0].severity == SEVERITIES[0]
    out = Terminal()
    replace(report, how=dict(report.how, input="built-in sample")).show(out, page="report.html")
    console = Console(record=True, width=82, file=io.StringIO())
    console.print(Text("$ regard demo", style="bold"))
    for line in out.getvalue().splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    svg = FONTS.sub("", console.export_svg(title="regard"))
    path = Path(__file__).with_name("screen.svg")
    path.write_text(svg.replace("Fira Code", "ui-monospace, Menlo, Consolas"), encoding="utf-8")


if __name__ == "__main__":
    main()
