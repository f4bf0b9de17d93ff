"""The exported explorer: one file that asks the network for nothing, and whose JavaScript agrees with the library."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch

import regard
from regard.cli import main
from regard.lab.explorer.export import read_part
from regard.lab.explorer.views import NUMBERS, normalizer_choices

ROWS = [[-2.0, 0.1, 0.5, 3.0], [0.3, 0.2, 0.1, -0.1], [30.0, -20.0, 29.5, 1.0], [-1.0, -2.0, -0.5, -4.0]]


def test_the_command_writes_one_file_without_addresses(tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["explore", "--export", str(path)]) == 0
    page = path.read_text("utf-8")
    assert str(path) in capsys.readouterr().out
    assert "http:" not in page and "https:" not in page and "src=" not in page
    assert main(["explore", "--export", str(tmp_path / "page.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's JavaScript")
def test_the_javascript_agrees_with_the_library():
    script = read_part("normalizers.js") + (
        "const names = Object.keys(NORMALIZERS); const rows = JSON.parse(process.argv[1]);"
        "console.log(JSON.stringify(names.map((n) => [n, rows.map((r) => measure(r, n))])))"
    )
    done = subprocess.run(
        ["node", "-e", script, json.dumps(ROWS)], capture_output=True, text=True, check=True, timeout=60
    )
    found = dict(json.loads(done.stdout))
    assert sorted(found) == sorted(normalizer_choices())
    scores = torch.tensor(ROWS, dtype=torch.float64)
    for name, measured in found.items():
        weights = regard.normalize(scores, name, backend="reference")
        torch.testing.assert_close(
            torch.tensor([one["weights"] for one in measured]).double(), weights, atol=1e-6, rtol=0
        )
        exact = regard.statistics.of_scores(scores, normalizer=name)
        for statistic in NUMBERS:
            numbers = torch.tensor([one[statistic] for one in measured], dtype=torch.float64)
            torch.testing.assert_close(
                numbers, exact[statistic], atol=1e-5, rtol=1e-5, msg=lambda m: f"{name} {statistic} {m}"
            )
