"""Generates the pages that are no files of this folder: claims, normalisers, notebooks, the lab page, the explorer.

A hook of mkdocs.yml. In any page, `$…$` and `$$…$$` become MathML, `[[figure: CLAIM]]` the claim's own figure,
`[[training: EXPERIMENT-FIGURE]]` a figure and `[[results: EXPERIMENT]]` the table of a trained experiment,
`[[times: EXPERIMENT]]` the table of its step times. Text between `<!-- in the file -->` and `<!-- on the site -->` is
for readers of the file and not on the site.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from html import escape
from pathlib import Path

import regard_lab as lab
import torch
from regard_lab import training
from regard_lab.claim import NOTES
from regard_lab.explorer.command import render
from regard_lab.figure import Figure
from regard_lab.mathml import formula_line, mathml
from regard_lab.page import ROLES, VERDICTS
from regard_lab.page import page as lab_page
from regard_lab.training import timing
from regard_lab.training.command import table

import regard
from regard import listing
from regard.health.commands.rule import make_page as rules_page
from regard.health.models import tiny
from regard.health.models.inputs import sample_text
from regard.health.report.page import report_page

HERE = Path(__file__).parent
NOTEBOOKS = sorted((HERE.parent / "notebooks").glob("*.ipynb"))


@cache
def results() -> dict[str, lab.Result]:
    """Every claim, run once per build; one that fails fails the build."""
    return {name: lab.run(name) for name in lab.names()}


@cache
def trained() -> dict[str, Figure]:
    """EXPERIMENT-FIGURE → figure, of every result that this checkout ships."""
    return {
        f"{name}-{title}": figure
        for name in training.names()
        if training.has_shipped(name)
        for title, figure in training.get(name).figures(training.shipped(name)).items()
    }


def pages() -> dict[str, str]:
    """path → Markdown (or SVG) of everything that is generated."""
    made = {"claims/index.md": claims_index(), "normalizers/index.md": normalizers_index()}
    for note in NOTES:
        made[f"claims/note-{note}.md"] = claims_of(note)
    for name, result in results().items():
        made[f"claims/{name}.svg"] = result.finding.figure.svg(400, 240)
    for name, figure in trained().items():
        made[f"training/{name}.svg"] = figure.svg(420, 260)
    for name in regard.normalizers.names():
        made[f"normalizers/{name}.md"] = normalizer_page(name)
        made[f"normalizers/{name}.svg"] = normalizer_figure(name).svg(400, 240)
    for path in NOTEBOOKS:
        made[f"notebooks/{path.stem}.md"] = notebook_page(path)
    made["rules.md"] = rules_page()
    made["sample-report.html"] = sample_report()
    made["explore.html"] = render()
    made["lab.html"] = lab_page(list(results().values()))
    return made


def sample_report() -> str:
    """The page of `regard demo`: a small model that was trained without 1/√d."""
    model, _ = tiny.checkpoint("tiny-unscaled")
    texts = tiny.batches(sample_text(), model.options["length"], 8)
    report = regard.examine(
        model, texts, ["scale=sqrt", "qk_norm"], title="tiny-unscaled", tokenizer=tiny.CHARACTERS.__getitem__
    )
    return report_page.render(report)


def claims_index() -> str:
    rows = "\n".join(
        f"| [{name}](note-{r.claim.note[:3]}.md#{name}) | {verdict(r)} | {cell(r.claim.statement)} |"
        for name, r in results().items()
    )
    return f"""# What the notes claim, and what is true

Five study notes on softmax and attention, claim by claim. Each claim is one file in `lab/regard_lab/claims/` that
measures it; an interval (99.99 %, of trained models 95 % over seeds) that lies in what the claim allows agrees, one
that lies outside disagrees.

| claim | verdict | statement |
| --- | --- | --- |
{rows}

## Run them

`regard lab` runs them all and writes `lab.html`; `regard lab dot-variance` prints one whole; `regard lab --json` is for
programs; `--seed 7` draws other numbers and gives the same verdicts.

## Add one

A claim is one file `lab/regard_lab/claims/note_001/my_claim.py` that defines `measure(sampler)` under `@claim(…)`,
which names the statement, its derivation in LaTeX and the rule in words. `measure` returns a `Finding`, a list of
checks. Checks of the claim itself decide between right and wrong; those marked `.beyond()` lie outside the condition
that the finding names, and those marked `.ours()` compare our own derivation with the measurement. Nothing else needs
an edit.
"""


def claims_of(note: str) -> str:
    sections = "\n".join(claim_section(r) for r in results().values() if note in r.claim.note.split(", "))
    return f"# Note {note}: {NOTES[note]}\n\n{sections}"


def claim_section(result: lab.Result) -> str:
    claim, finding = result.claim, result.finding
    formulas = "".join(map(formula_line, claim.derivation))
    remarks = [("Holds if", result.condition), ("Right", result.right), ("Remark", finding.remark)]
    remarks_text = "\n\n".join(f"**{label}:** {escape(text)}" for label, text in remarks if text)
    rows = "\n".join(
        f"| {cell(c.what)} | {cell(c.allowed)} | {cell(repr(c.measured))} | {'agrees' if c.agrees else 'disagrees'} "
        f"| {ROLES[c.role]} |"
        for c in finding.checks
    )
    return f"""## {claim.id} {{ #{claim.id} }}

{verdict(result)} {escape(claim.statement)}

<div class="derivation">{formulas}</div>

![{bracket(finding.figure.alt)}]({claim.id}.svg)

{remarks_text}

| check | predicted | measured | outcome | part |
| --- | --- | --- | --- | --- |
{rows}

*Rule: {escape(claim.rule)}*
"""


def verdict(result: lab.Result) -> str:
    return f'<span class="verdict {result.verdict}">{VERDICTS[result.verdict]}</span>'


def cell(text: str) -> str:
    """Text that may stand in a Markdown table."""
    return re.sub(r"([_*|])", r"\\\1", escape(text))


def bracket(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")


def normalizers_index() -> str:
    rows = "\n".join(
        f"| [{name}]({name}.md) | {cell(row['formula'])} | {cell(row['sums_to'])} | "
        f"{'yes' if row['sparse'] else 'no'} | {cell(row['family'])} |"
        for name, row in listing.rows().items()
    )
    return f"""# Normalisers

Each is one file; kernels, CPU path, statistics, tests, this page and `regard list` pick it up with no other edit.

| name | weights | rows sum to | sparse | family |
| --- | --- | --- | --- | --- |
{rows}
"""


def normalizer_page(name: str) -> str:
    row = listing.rows()[name]
    text = regard.normalizers.file_of(name).read_text(encoding="utf-8")
    summary, _, rest = (ast.get_docstring(ast.parse(text)) or name).partition("\n\n")
    prose, mark, example = rest.partition(">>>")
    example = f"```python\n{mark}{example}\n```\n" if mark else ""
    parameter = row["parameter"]
    knob = f"- parameter: `{parameter['name']}`, default {parameter['default']:g}\n" if parameter else ""
    return f"""# {name}

{cell(summary)}

{cell(prose)}

{example}
![{bracket(normalizer_figure(name).alt)}]({name}.svg)

- weights: {cell(row["formula"])}
- rows sum to {cell(row["sums_to"])}; exact zeros: {"yes" if row["sparse"] else "no"}
- family: {row["family"]}
{knob}- paper: {cell(row["paper"])}

## Its file

```python
{text.strip()}
```
"""


def notebook_page(path: Path) -> str:
    """A notebook's text, code and outputs; its badge, an image of another site, becomes a link."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += [notebook_output(one) for one in cell.get("outputs", ())]
    return re.sub(r"\[!\[(.*?)\]\(.*?\)\]", r"[\1]", "\n\n".join(parts) + "\n")


def notebook_output(output: dict) -> str:
    """What a cell printed or showed: text, or a figure."""
    data = output.get("data", {})
    if "image/png" in data:
        return (
            f'<p><img alt="The figure that the cell above draws" src="data:image/png;base64,{data["image/png"]}"></p>'
        )
    return f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"


def notebook_title(path: Path) -> str:
    return notebook_page(path).partition("\n")[0].removeprefix("# ")


def normalizer_figure(name: str) -> Figure:
    """The weights of three scores, (x, 0, 1), as the first one moves."""
    x = torch.linspace(-4, 4, 81, dtype=torch.float64)
    p = regard.normalize(torch.stack([x, torch.zeros_like(x), torch.ones_like(x)], -1), name)
    series = {f"score {label}": (x.tolist(), p[:, i].tolist()) for i, label in enumerate(("x", "0", "1"))}
    words = (
        f"{name}: the weights of the scores x, 0 and 1 as x goes from −4 to 4; the first ends at {float(p[-1, 0]):.2f}."
    )
    return Figure("lines", "x", "weight", series, alt=words)


def on_config(config):
    """The generated pages' places in the navigation; a page that this checkout lacks has none."""
    members = [{name: f"normalizers/{name}.md"} for name in regard.normalizers.names()]
    notes = [{f"Note {note}: {title}": f"claims/note-{note}.md"} for note, title in NOTES.items()]
    made = {"normalizers/index.md", "claims/index.md"}
    for section in config.nav:
        for title, entries in section.items():
            if isinstance(entries, list):
                section[title] = [e for e in entries if _path(e) in made or (HERE / _path(e)).is_file()]
                for entry in section[title]:
                    if "Normalisers" in entry:
                        entry["Normalisers"] = [{"All": "normalizers/index.md"}, *members]
                    if "Notebooks" in entry:
                        shown = [{notebook_title(path): f"notebooks/{path.stem}.md"} for path in NOTEBOOKS]
                        entry["Notebooks"] = [{"All": "notebooks.md"}, *shown]
                    if "Claims" in entry:
                        entry["Claims"] = [{"All": "claims/index.md"}, *notes]
    return config


def _path(entry: dict[str, str]) -> str:
    return next(iter(entry.values()))


def on_files(files, config):
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Mathematics and figures, outside code, and without what is said to those who read the file itself."""
    markdown = re.sub(r"<!-- in the file -->.*?<!-- on the site -->\n*", "", markdown, flags=re.DOTALL)
    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.DOTALL)
    depth = "../" * page.file.src_uri.count("/")
    return "".join(part if part.startswith("`") else _typeset(part, depth) for part in parts)


def results_table(name: str) -> str:
    """The table of a trained experiment and the variants that it leaves out; without a result, how to make one."""
    if not training.has_shipped(training.get(name).name):
        return f"*Not measured in this version: `regard lab train {name} --preset full` does it.*"
    result = training.shipped(name)
    left_out = [f"{variant} ({why})" for variant, why in result["how"].get("left_out", {}).items()]
    return table(result).markdown() + (f"\n\nLeft out: {', '.join(left_out)}." if left_out else "")


def times_table(name: str) -> str:
    return timing.table("", timing.shipped_times(name)["times"]).markdown()


def _typeset(text: str, depth: str) -> str:
    def figure(match):
        name = match[1]
        return f"![{bracket(results()[name].finding.figure.alt)}]({depth}claims/{name}.svg)"

    def course(match):
        return f"![{bracket(trained()[match[1]].alt)}]({depth}training/{match[1]}.svg)"

    text = re.sub(r"\[\[figure: ([\w-]+)\]\]", figure, text)
    text = re.sub(r"\[\[training: ([\w-]+)\]\]", course, text)
    text = re.sub(r"\[\[results: ([\w-]+)\]\]", lambda m: results_table(m[1]), text)
    text = re.sub(r"\[\[times: ([\w-]+)\]\]", lambda m: times_table(m[1]), text)
    text = re.sub(
        r"\$\$(.+?)\$\$", lambda m: f'<div class="derivation">{mathml(m[1], block=True)}</div>', text, flags=re.S
    )
    return re.sub(r"\$([^$\n]+)\$", lambda m: f"<span>{mathml(m[1])}</span>", text)
