"""The error budget holds: every normaliser and statistic over flat, sharp, nearly one-hot and million-key rows."""

from __future__ import annotations

import pytest
import torch
from rows_data import ONE_OF_EACH

pytest.importorskip("numba")

from bench import accuracy
from bench.__main__ import COMMANDS

import regard
from regard.cli import main


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_the_budget_is_kept(dtype):
    entries = accuracy.measure("cpu", quick=True, dtypes=[dtype])
    assert {entry.what for entry in entries} == {what for names in accuracy.PARTS.values() for what in names}
    assert [entry for entry in entries if not entry.is_within_budget] == []


def test_the_budget_is_kept_in_16_bits():
    """Of one normaliser of each family: kernels differ from those of float32 in load and store alone."""
    entries = accuracy.measure("cpu", quick=True, dtypes=[torch.bfloat16], names=ONE_OF_EACH)
    assert {entry.what for entry in entries} >= {*ONE_OF_EACH, *(f"statistics of {name}" for name in ONE_OF_EACH)}
    assert [entry for entry in entries if not entry.is_within_budget] == []


@pytest.mark.parametrize("name", ["softmax", pytest.param("entmax15", marks=pytest.mark.slow)])
def test_the_budget_is_kept_over_a_million_keys(name):
    entries = accuracy.measure("cpu", dtypes=[torch.float32], names=[name])
    assert {entry.kind for entry in entries} == set(accuracy.KINDS)
    assert [entry for entry in entries if not entry.is_within_budget] == []


def test_a_broken_budget_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(accuracy, "DTYPES", (torch.float32,))
    monkeypatch.setattr(accuracy, "KINDS", {"normal": (4, 64, 1.0)})
    monkeypatch.setitem(accuracy.WEIGHTS, torch.float32, 1e-9)
    monkeypatch.setitem(accuracy.STATISTICS, torch.float32, 1e-12)
    page = tmp_path / "page.md"
    assert main(["bench", "accuracy", "--device", "cpu", "--quick", "--markdown", str(page)], COMMANDS) == 1
    told = capsys.readouterr().err
    assert "softmax, normal, float32" in told and "statistics of relu (" in told
    assert "| softmax | float32 |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", regard.normalizers.names())
def test_scores_of_any_size_at_any_temperature(name):
    """relu's and softpick's weights end where float32 does: docs/records/accuracy.md."""
    unit = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).clamp(-3.0, 3.0)
    for size in (1e-20, 1e-6, 1.0, 1e6, 1e20):
        for temperature in (1e-15, 1e-6, 1.0, 1e6, 1e15):
            if name in ("relu", "softpick") and size / temperature < 1e-37:
                continue
            z = unit * size
            true = regard.reference.normalize(z.double(), name, temperature=temperature)
            off = (regard.normalize(z, name, temperature=temperature) - true).abs() / true.amax(-1, keepdim=True)
            assert off.max() <= (3.1e-5 if name == "entmax" else 1.9e-6), (size, temperature)
