"""Every notebook is short, opens in Colab, and holds what its own code shows."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/github/regard-attention/regard/blob/main/notebooks/"
SOURCE = '"regard[cpu] @ git+https://github.com/regard-attention/regard"'  # until there is a release


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "tools" / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    return json.loads(path.read_text("utf-8"))


def list_kinds(notebook):
    """Of each output of each cell, what it is: printed text, or the forms of a value or figure."""
    return [
        [sorted(one.get("data", ["stream"])) for one in cell["outputs"]]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_opens_in_colab(path):
    cells = read(path)["cells"]
    first, second = ("".join(cell["source"]) for cell in cells[:2])
    assert len(cells) < 10
    assert cells[0]["cell_type"] == "markdown" and first.startswith("# ") and f"({COLAB}{path.name})" in first
    assert second.startswith("%pip install") and SOURCE in second


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_of_this_code(path, tool):
    notebook = read(path)
    assert notebook["metadata"]["regard"]["code"] == tool.hash_code(notebook), "run: make notebooks"
    assert any(list_kinds(notebook)) and path.stat().st_size < 100_000
    changed = copy.deepcopy(notebook)
    changed["cells"][1]["source"] = ["another line"]
    assert tool.hash_code(changed) != tool.hash_code(notebook)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_the_same_again(path, tool):
    pytest.importorskip("matplotlib")
    notebook = read(path)
    again = copy.deepcopy(notebook)
    tool.run(again)
    assert list_kinds(again) == list_kinds(notebook)
