"""The error budget holds: every normaliser and statistic over flat, sharp, nearly one-hot and million-key rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from regard.bench import accuracy
from regard.cli import main


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_budget_is_kept(dtype):
    entries = accuracy.measure("cpu", quick=True, dtypes=[dtype])
    assert {entry.what for entry in entries} == {what for names in accuracy.PARTS.values() for what in names}
    assert [entry for entry in entries if not entry.kept] == []


def test_the_budget_is_kept_over_a_million_keys():
    entries = accuracy.measure("cpu", dtypes=[torch.float32], names=["softmax", "entmax15"])
    assert {entry.kind for entry in entries} == set(accuracy.KINDS)
    assert [entry for entry in entries if not entry.kept] == []


def test_a_broken_budget_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(accuracy, "DTYPES", (torch.float32,))
    monkeypatch.setattr(accuracy, "KINDS", {"normal": (4, 64, 1.0)})
    monkeypatch.setitem(accuracy.WEIGHTS, torch.float32, 1e-9)
    page = tmp_path / "page.md"
    assert main(["bench", "accuracy", "--device", "cpu", "--quick", "--markdown", str(page)]) == 1
    assert "softmax, normal, float32" in capsys.readouterr().err
    assert "| softmax | float32 |" in page.read_text(encoding="utf-8")
