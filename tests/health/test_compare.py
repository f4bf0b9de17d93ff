"""regard compare on nonsense: one clear line, a non-zero exit, nothing half-written; gaps are data, kinds are added."""

import json

import pytest
import torch
from saved_models import refused
from torch import nn

import regard
from regard.cli import main
from regard.health.report import files


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return regard.examine(model, [torch.randn(2, 24, 16)]).to_json()


def written(path, report):
    path.write_text(json.dumps(report))
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "it holds a int"),
        ('{"heads": [], "findings": []}', "it has no title"),
        ('{"title": "x", "heads": {}, "findings": []}', "no list of heads"),
        ('{"title": "x", "heads": [1], "findings": []}', "heads[0] is invalid"),
        ('{"title": "x", "heads": [], "findings": [{"kind": "diffuse", "heads": 3}]}', "findings[0] is invalid"),
        ('{"title": "x", "heads": [], "findings": [], "unmeasured": 7}', "unmeasured is not a list"),
    ],
)
def test_files_that_are_no_reports_are_not_compared(text, words, tmp_path, capsys, data):
    good = written(tmp_path / "good.json", data)
    (tmp_path / "bad.json").write_text(text)
    refused(capsys, "compare", good, "bad.json", "--out", "both.html", words=words)
    assert not (tmp_path / "both.html").exists()


@pytest.mark.parametrize("value", ["0.5", float("nan"), 10**400, [1], True])
def test_a_statistic_that_is_no_number_is_no_reading(value, tmp_path, capsys, data):
    bad = json.loads(json.dumps(data))
    bad["heads"][1]["statistics"]["max_logit"]["mean"] = value
    refused(capsys, "compare", written(tmp_path / "bad.json", bad), "bad.json", words="heads[1] is invalid")


def test_what_compare_cannot_read_or_write_is_told_in_a_line(tmp_path, capsys, data, monkeypatch):
    good = written(tmp_path / "good.json", data)
    (tmp_path / "folder").mkdir()
    refused(capsys, "compare", good, "nowhere.json", words="there is no file")
    refused(capsys, "compare", good, "folder", words="compare two of a kind")
    refused(capsys, "compare", good, good, "--out", "both.pdf", words="must end in .html")
    refused(capsys, "compare", good, good, "--heads", "-1", words="--heads must be at least 0")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    refused(capsys, "compare", good, good, "--out", "both.html", words="No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "good.json"]


def test_findings_of_one_kind_are_added_and_gaps_are_told(tmp_path, capsys, data):
    one = dict(kind="scale off", severity="warning", evidence="", threshold="", remedy="", measured=[])
    findings = [dict(one, heads=[["a", 0]] * 12, indices=[0] * 12), dict(one, heads=[["a", 1]], indices=[0])]
    two = dict(data, findings=findings, unmeasured=[["b", "?"]])
    nothing = dict(data, heads=[], findings=[], interrupted="KeyboardInterrupt\x1b[2J")
    a, b = written(tmp_path / "a.json", two), written(tmp_path / "b.json", nothing)
    assert main(["compare", str(a), str(b), "--out", "both.html"]) == 2
    out = capsys.readouterr().out
    first, *rest = out.splitlines()
    assert first.startswith("– No verdict: B: nothing was measured") and "Resolved" not in out
    assert "unchecked in B: scale off in self_attn, heads 0–1" in rest
    assert "layers not measured: 1" in out
    assert r"nothing was measured; not finished: KeyboardInterrupt\x1b[2J" in out
    assert "nothing was measured; not finished: KeyboardInterrupt" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_number_of_most_changed_heads_reaches_the_page(count, tmp_path, capsys, data):
    path = written(tmp_path / "a.json", data)
    assert main(["compare", str(path), str(path), "--heads", str(count), "--out", "both.html"]) == 0
    for text, start in ((capsys.readouterr().out, "0·"), ((tmp_path / "both.html").read_text(), "<tr><th>0·")):
        assert text.count(f"{start}0") + text.count(f"{start}1") == count
