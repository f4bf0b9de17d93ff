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
from regard.health.examine import examine
from regard.health.models import inputs, tiny

FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's point to a server; a reader's own monospace serves
STYLES = {"✗": "bold red", "1 ": "bold red", "$": "bold", "  layer": "dim"}


def main() -> None:
    model, _ = tiny.checkpoint("tiny-unscaled")
    texts = tiny.batches(inputs.sample_text(), model.options["length"], 8)
    report = examine(
        model, texts, ["qk_norm"], title="tiny-unscaled", tokenizer=tiny.CHARACTERS.__getitem__, ablate=False
    )
    assert report.diagnosis[0].severity == SEVERITIES[0]
    out = io.StringIO()
    replace(report, how=dict(report.how, input="built-in sample")).show(out, page="report.html")
    console = Console(record=True, width=82, file=io.StringIO())
    for line in ["$ regard examine ./tiny-unscaled --what-if qk_norm", *out.getvalue().splitlines()]:
        style = next((style for start, style in STYLES.items() if line.startswith(start)), "")
        console.print(Text(line, style=style), soft_wrap=True)
    svg = FONTS.sub("", console.export_svg(title="regard"))
    path = Path(__file__).with_name("screen.svg")
    path.write_text(svg.replace("Fira Code", "ui-monospace, Menlo, Consolas"), encoding="utf-8")


if __name__ == "__main__":
    main()
