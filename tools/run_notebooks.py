"""Runs notebooks/*.ipynb and writes what their cells show into the files.  make notebooks

A page of a report is kept as its text, because it has hundreds of kilobytes. `tests/test_notebooks.py` fails where a
notebook's code is no longer the one that was run.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 20_000  # characters of an output's HTML


def main() -> None:
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run(notebook)
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def run(notebook: dict[str, Any]) -> None:
    """Runs the cells in an empty folder and puts their outputs and the hash of their code into `notebook`."""
    import matplotlib

    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        known = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), folder, *([known] if known else [])])
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    count += 1
                    cell["execution_count"] = count
                    cell["outputs"] = run_cell("".join(cell["source"]), names, count)
        finally:
            os.environ.pop("PYTHONPATH") if known is None else os.environ.update(PYTHONPATH=known)
    notebook["metadata"]["regard"] = {"code": hash_code(notebook)}


def hash_code(notebook: dict[str, Any]) -> str:
    """The hash of the code of all cells, by which a test tells whether the outputs are of this code."""
    code = "\0".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def run_cell(text: str, names: dict[str, Any], count: int = 1) -> list[dict[str, Any]]:
    """Runs a cell as Jupyter does: `%%writefile` writes, other magics are left out, a last expression is shown."""
    if text.startswith("%%writefile"):
        head, content = text.split("\n", 1)
        Path(head.split()[1]).write_text(content, encoding="utf-8")
        return []
    tree = ast.parse("\n".join(line for line in text.splitlines() if not line.startswith("%")))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    outputs, printed = [], io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None
    if printed.getvalue():
        outputs.append(dict(output_type="stream", name="stdout", text=_lines(printed.getvalue())))
    if value is not None and not text.rstrip().endswith(";"):
        outputs.append(dict(output_type="execute_result", execution_count=count, metadata={}, data=_show(value)))
    return outputs + [dict(output_type="display_data", metadata={}, data=data) for data in _draw_figures()]


def _show(value: Any) -> dict[str, Any]:
    """What a notebook shows of a value; large HTML as text."""
    page = value._repr_html_() if hasattr(value, "_repr_html_") else ""
    if len(page) > LARGEST:
        return {"text/plain": _lines(str(value))}
    return {**({"text/html": _lines(page)} if page else {}), "text/plain": _lines(repr(value))}


def _draw_figures() -> list[dict[str, Any]]:
    """Every open figure as a PNG, closed then."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    found = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, dpi=70, metadata={"Software": None})
        found.append({"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]})
        pyplot.close(number)
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main()
