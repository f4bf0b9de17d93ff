"""What a notebook shows of statistics, claims and a running examination."""

from __future__ import annotations

import math
import re

import regard_lab as lab
import torch

import regard


def test_statistics_show_four_numbers_of_their_finite_rows():
    stats = regard.statistics.Statistics({"max_logit": torch.tensor([[1.0, 2.0, 9.0, -math.inf]])})
    shown = stats._repr_html_()
    assert "max_logit 1 2 4 9" in re.sub("(<[^>]*>)+", " ", shown)
    assert "Statistics of 1 × 4 rows" in shown
    assert ">–</td>" in regard.statistics.Statistics({"entropy": torch.empty(0)})._repr_html_()


def test_a_claim_shows_its_page_in_a_sandbox_without_addresses():
    shown = lab.run("range")._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="') and "range" in shown
    assert "src=&quot;http" not in shown


def test_examine_counts_batches_when_asked(capsys):
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    regard.examine(model, [torch.randn(1, 6, 16)] * 2, progress=True)
    lines = capsys.readouterr().err.split("\r")
    told = [line for line in lines if line.startswith("examine: measuring batch")]
    assert "batch 1 of 2" in told[0] and "batch 2 of 2" in told[-1]
    assert any("checking" in line for line in lines) and lines[-1] == ""  # the line is wiped in the end
    regard.examine(model, [torch.randn(1, 6, 16)], progress=False)
    assert not capsys.readouterr().err
