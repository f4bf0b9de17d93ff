"""Every notebook runs from top to bottom, is short, holds no outputs, and opens in Colab."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/github/regard-attention/regard/blob/main/notebooks/"


def read_cells(path: Path) -> list[tuple[str, str]]:
    """(kind, text) of each cell."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]


def run_cell(text: str, names: dict) -> None:
    """Run a cell as Jupyter does: `%%writefile` writes, other magics install, a last expression shows itself."""
    if text.startswith("%%writefile"):
        head, content = text.split("\n", 1)
        Path(head.split()[1]).write_text(content, encoding="utf-8")
        return
    tree = ast.parse("\n".join(line for line in text.splitlines() if not line.startswith("%")))
    shown = None if text.rstrip().endswith(";") else tree.body.pop() if tree.body else None
    last = ast.Expression(shown.value) if isinstance(shown, ast.Expr) else None
    if shown is not None and last is None:
        tree.body.append(shown)
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(last, "cell", "eval"), names)
        show = getattr(value, "_repr_html_", None)
        assert value is None or (show() if show else repr(value))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_opens_in_colab(path):
    cells = read_cells(path)
    assert len(cells) < 10
    assert cells[0][0] == "markdown" and cells[0][1].startswith("# ") and f"({COLAB}{path.name})" in cells[0][1]
    assert all(not cell.get("outputs") for cell in json.loads(path.read_text("utf-8"))["cells"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    names: dict = {"__name__": "__main__"}
    for kind, text in read_cells(path):
        if kind == "code":
            run_cell(text, names)
    pyplot.close("all")
