"""The report: JSON by its schema, one HTML file that needs nothing, nothing half-written, text that cannot run."""

import base64
import gzip
import hashlib
import html
import io
import json
import os
import re
import sys
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import regard
from regard.health import checks, examine
from regard.health.checks.finding import Finding
from regard.health.report import files, screen
from regard.health.report.differences import list_most_changed
from regard.health.report.page import report_page as page
from regard.health.report.report import Report, WhatIfReading


def model(layers=2, sharp=1.0):
    torch.manual_seed(0)
    made = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), layers, enable_nested_tensor=False
    )
    with torch.no_grad():
        for layer in made.layers:
            layer.self_attn.in_proj_weight[:32] *= sharp
    return made


@pytest.fixture(scope="module")
def report():
    return examine(model(sharp=40.0), [torch.randn(2, 24, 16)], what_if=["temperature=2", "normalizer=sparsemax"])


def numbers(html):
    packed = re.search(r'id="numbers">([^<]*)<', html).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_json_follows_its_schema(report, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(resources.files("regard.health").joinpath("schema.json").read_text())
    data = json.loads(report.save(tmp_path / "report.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(data)
    assert data == json.loads(json.dumps(report.to_json()))
    head, first = data["heads"][5], report.heads[5]
    assert (head["layer"], head["index"], head["head"]) == (first.layer, 1, 1)
    assert head["statistics"]["entropy"]["q50"] == first.statistics["entropy"].quantile(0.5)
    assert set(head["statistics"]) >= {*regard.statistics.NAMES, "entropy_ratio"}
    assert data["findings"]
    assert data["what_if"].keys() == {"temperature=2", "normalizer=sparsemax"}


def test_a_report_says_itself_in_a_line(report):
    said = repr(report)
    assert report.title in said and report.summary()[0] in said and ".show()" in said
    assert "\n" not in said and len(said) < 600


def test_printing_a_report_shows_what_the_command_shows(report, capsys):
    report.show()
    assert f"{report}\n" == capsys.readouterr().out
    assert report.diagnosis[0].kind in str(report) and report.diagnosis[0].evidence not in repr(report)


def test_html_needs_nothing_and_admits_nothing(report):
    html = page.render(report)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    script = re.findall(r"<script>(.*?)</script>", html, re.S)
    style = re.findall(r"<style>(.*?)</style>", html, re.S)
    for kind, (text,) in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "style=" not in html.replace("--", "")


def test_html_holds_the_numbers(report):
    data = numbers(page.render(report))
    at = data["statistics"].index("entropy")
    for head, shown in zip(report.heads, data["treatments"][0]["heads"], strict=True):
        assert shown["numbers"][at][0] == pytest.approx(head.statistics["entropy"].mean, rel=1e-4)
        assert sum(shown["shapes"][at]) == pytest.approx(1000, abs=30)
    assert [treatment["name"] for treatment in data["treatments"]] == [
        "as measured",
        "temperature=2",
        "normalizer=sparsemax",
    ]


def test_size_does_not_depend_on_the_length():
    sizes = [len(page.render(examine(model(), [torch.randn(1, length, 16)]))) for length in (64, 512)]
    assert abs(sizes[1] - sizes[0]) < 0.35 * sizes[0]
    assert max(sizes) < 3_000_000


def test_many_heads_stay_under_the_limit(report, monkeypatch):
    monkeypatch.setattr(page, "LIMIT", 6000)
    html = page.render(report)
    assert len(numbers(html)["treatments"][0]["heads"]) == len(report.heads)  # detail goes, no head does
    assert numbers(html)["treatments"][0]["heads"][0]["shapes"][0] == []


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def test_text_from_models_is_escaped():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self._modules[EVIL.replace(".", "")] = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            with torch.no_grad():
                next(iter(self._modules.values())).self_attn.in_proj_weight[:32] *= 400.0

        def forward(self, x):
            return next(iter(self._modules.values()))(x)

    report = examine(Named(), [torch.randn(2, 24, 16)], title=EVIL)
    assert report.findings
    html = page.render(report)
    body = html[html.index("<body>") : html.index('<script type="application/octet-stream"')]
    assert "<script" not in body
    assert "<img" not in body
    assert "&lt;/script&gt;" in body


def test_files_are_written_whole_or_not_at_all(report, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        report.save(path)
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    monkeypatch.undo()
    report.save(path)
    assert path.read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match=r"\.html, \.json or \.png"):
        report.save(tmp_path / "report.pdf")
    with pytest.raises(ValueError, match="there is no folder"):
        report.save(tmp_path / "none" / "report.json")


def test_png(report, tmp_path):
    pytest.importorskip("matplotlib")
    data = report.save(tmp_path / "maps.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 20_000


def test_the_terminal_view_says_what_the_report_says(report):
    out = io.StringIO()
    report.show(out, full=True)
    text = out.getvalue()
    for finding in report.findings:
        assert finding.kind in text
        assert finding.remedy in " ".join(text.split())
    assert "layers.1.self_attn" in text
    assert "what if temperature=2" in text
    assert "\x1b" not in text


def test_a_terminal_without_blocks_gets_digits():
    report = examine(model(sharp=4.0), [torch.randn(2, 24, 16)])
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    report.show(out, full=True)
    out.flush()
    lines = raw.getvalue().decode().splitlines()
    assert "one digit per head, from 0 (0) to 1 (9); largest logit: of the layer" in lines
    (data,) = [line.split()[2] for line in lines if "layers.1.self_attn " in line]
    ratios = [head.statistics["entropy_ratio"].mean for head in report.heads if head.index == 1]
    assert data == "".join(str(int(10 * ratio)) for ratio in ratios) and len(set(data)) > 1


def test_the_summary_names_what_was_found(report):
    said = " ".join(report.summary())
    assert "8 heads in 2 attention layers, measured on 48 rows each." in said
    assert report.summary()[0].lower() == f"{report.diagnosis[0].kind} since layers.0.self_attn."
    healthy = examine(model(sharp=2.0), [torch.randn(4, 24, 16)])
    assert healthy.findings == []
    assert (
        f"No problem found in these {len(checks.kinds(runs=False)) + len(healthy.checks.done)} checks."
        in healthy.summary()
    )


def test_comparing_two_reports(report, tmp_path, capsys):
    from regard.cli import main

    other = examine(model(sharp=2.0), [torch.randn(2, 24, 16)])
    a, b = report.save(tmp_path / "a.json"), other.save(tmp_path / "b.json")
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    means = [sum(h.statistics["entropy_ratio"].mean for h in one.heads[:4]) / 4 for one in (report, other)]
    assert f"{means[0]:.3g} → {means[1]:.3g}" in out and "gone in B" in out
    assert "scale off" in out
    assert len(list_most_changed(report, other, 3).rows) == 3
    for nonsense in (
        "[]",
        '{"heads": [1], "findings": [], "title": "x"}',
        '{"heads": [], "findings": [{}], "title": "x"}',
        '{"heads": [], "findings": [{"kind": "dead", "heads": [["a", 0]], "indices": []}], "title": "x"}',
    ):
        (tmp_path / "c.json").write_text(nonsense)
        assert main(["compare", str(a), str(tmp_path / "c.json")]) == 2
        assert "is not a report" in capsys.readouterr().err
    assert main(["compare", str(a), str(tmp_path / "d.json")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_two_reports_as_one_page(report, tmp_path, capsys):
    from regard.cli import main

    other = examine(model(sharp=2.0), [torch.randn(2, 24, 16)], title=EVIL)
    a, b, out = report.save(tmp_path / "a.json"), other.save(tmp_path / "b.json"), tmp_path / "both.html"
    assert main(["compare", str(a), str(b), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    html = out.read_text()
    assert EVIL not in html
    assert "https:" not in html
    drawn = numbers(html)
    assert [len(heads) for heads in drawn["reports"]] == [len(report.heads), len(other.heads)]
    assert drawn["least"] == numbers(page.render(report))["least"]  # below which a quantile has no digits
    row = drawn["statistics"].index("entropy")
    expected = other.heads[1].statistics["entropy"].to_json()
    data = dict(zip(drawn["keys"], drawn["reports"][1][1]["numbers"][row], strict=True))
    assert data == pytest.approx({key: expected[key] for key in drawn["keys"]}, rel=1e-4)
    assert main(["compare", str(a), str(b), "--out", str(tmp_path)]) == 2


def test_findings_of_one_kind_add_up(report):
    found = Finding("scale off", "warning", (("0", 0),), "too large", "", "", indices=(0,))
    again = replace(found, severity="note", heads=(("0", 1), ("0", 2)), indices=(0, 0))
    data = replace(report, findings=[found, again], what_if={"qk_norm": WhatIfReading(report.heads, [found, again])})
    shown = io.StringIO()
    data.show(shown, full=True)
    assert "what if qk_norm: scale off (3)\n" in shown.getvalue()
    assert "scale off (warning), 1 head: 0·0" in shown.getvalue()
    assert '<td class="words">scale off (3)</td>' in page.render(data)


def test_thousands_of_heads_keep_their_means(report, monkeypatch):
    monkeypatch.setattr(page, "LIMIT", 1)
    drawn = numbers(page.render(report))
    assert [treatment["name"] for treatment in drawn["treatments"]] == ["as measured"]
    assert {len(data) for head in drawn["treatments"][0]["heads"] for data in head["numbers"]} == {1}


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_report_has_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(0o077)
    try:
        private = files.write(tmp_path / "private", "x")
        os.umask(0o002)
        shared = files.write(tmp_path / "shared", "x")
    finally:
        os.umask(before)
    assert (private.stat().st_mode & 0o777, shared.stat().st_mode & 0o777) == (0o600, 0o664)


def test_an_interrupt_after_the_rename_is_told_as_itself(tmp_path, monkeypatch):
    def replace(source, target, rename=os.replace):
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "report", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_few_heads_that_cannot_be_judged_are_not_all(report):
    one, *others = report.heads
    few = replace(report, findings=[], unmeasured=[], heads=[replace(one, can_be_judged=False), *others])
    assert few.summary()[0].endswith("checks. 1 head had too few rows or keys to be judged.")
    none = replace(few, heads=[replace(head, can_be_judged=False) for head in report.heads])
    assert screen._verdict(none)[1] != screen.COLOURS["sound"] == screen._verdict(few)[1]
    assert none.summary()[0].startswith("Too few rows or keys to judge any head")


def test_a_report_is_loaded_from_its_json(report, tmp_path):
    path = report.save(tmp_path / "report.json")
    loaded = Report.load(path)
    assert loaded.is_loaded and not report.is_loaded
    assert loaded.to_json() == json.loads(path.read_text())
    assert loaded.findings == report.findings and loaded.unmeasured == report.unmeasured
    spread, original = (one.heads[3].statistics["entropy"] for one in (loaded, report))
    assert (spread.mean, spread.max, spread.quantile(0.95)) == (original.mean, original.max, original.quantile(0.95))
    with pytest.raises(ValueError, match=r"share must be 0\.05, 0\.5 or 0\.95"):
        spread.quantile(0.25)
    assert loaded.summary() == report.summary()
    clean = replace(loaded, findings=[])
    assert clean.summary()[-1] == replace(report, findings=[]).summary()[-1]
    out = io.StringIO()
    loaded.show(out, full=True)
    assert "layers.1.self_attn" in out.getvalue()
    drawn, full = numbers(page.render(loaded)), numbers(page.render(report))
    flagged = [[one["flagged"] for one in data["treatments"]] for data in (drawn, full)]
    assert flagged[0] == flagged[1] and flagged[0][0] and drawn["axes"][0] == []
    at = drawn["statistics"].index("entropy")
    mean = drawn["treatments"][2]["heads"][1]["numbers"][at][0]
    assert mean == pytest.approx(report.what_if["normalizer=sparsemax"].heads[1].statistics["entropy"].mean, rel=1e-3)


def test_files_that_are_no_whole_report_are_not_loaded(report, tmp_path):
    (tmp_path / "part.json").write_text(json.dumps({**report.to_json(), "what_if": None}))
    for path, words in (("part.json", "not a whole report"), ("none.json", "there is no file")):
        with pytest.raises(ValueError, match=words):
            Report.load(tmp_path / path)


def test_a_frame_has_a_row_per_head(report, monkeypatch):
    for package in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"regard\[frame\]"):
        report.to_frame()
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(DataFrame=list))
    rows = report.to_frame()
    assert len(rows) == len(report.heads)
    assert rows[5]["entropy_ratio"] == report.heads[5].statistics["entropy_ratio"].mean
    assert rows[5]["entropy_ratio_q95"] == report.heads[5].statistics["entropy_ratio"].quantile(0.95)
    kinds = [finding.kind for finding in report.findings if (1, 1) in finding.places]
    assert kinds and rows[5]["findings"] == ", ".join(kinds)


def test_a_plot_is_a_map_of_one_statistic(report):
    pytest.importorskip("matplotlib")
    figure = report.plot("max_weight")
    drawn = figure.axes[0].images[0].get_array()
    assert drawn.shape == (2, 4)
    assert drawn[1, 2] == pytest.approx(report.heads[6].statistics["max_weight"].mean)
    flagged = {place for finding in report.findings for place in finding.places}
    assert len(figure.axes[0].lines) == len(flagged)
    with pytest.raises(ValueError, match="statistic must be one of"):
        report.plot("sharpness")


def test_a_notebook_shows_the_page_in_a_sandbox(report):
    shown = report._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    inner = html.unescape(re.search(r'srcdoc="([^"]*)"', shown).group(1))
    assert numbers(inner) == numbers(page.render(report))
