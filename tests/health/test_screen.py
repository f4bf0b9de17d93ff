"""The report on one screen: 24 lines of 80 columns for any model, the cause first, its place in a folded map."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from regard.health.checks import rule_of
from regard.health.checks.finding import fill_finding
from regard.health.contract.run import Checks
from regard.health.report import screen
from regard.health.report.page import report_page
from regard.health.report.report import Report
from regard.health.report.writer import Writer


def head(layer, index, number, entropy=0.9, logit=3.0):
    means = {"entropy_ratio": entropy}
    statistics = SimpleNamespace(mean=lambda name: means.get(name, 1.0), max=lambda name: logit)
    return SimpleNamespace(
        layer=layer, index=index, head=number, statistics=statistics, reading=None, rows=64, can_be_judged=True
    )


def finding(code, places, **more):
    heads = tuple((f"layers.{index}", number) for index, number in places)
    indices = tuple(index for index, _ in places)
    rule = rule_of(code)
    return fill_finding(rule, rule.severity, heads, 30 * "evidence ", indices=indices, **more)


def make(layers, heads, findings=(), **more):
    found = [
        head(f"layers.{i}", i, h, 0.2 if i >= layers // 2 else 0.9, 70.0 if i >= layers // 2 else 3.0)
        for i in range(layers)
        for h in range(heads)
    ]
    return Report("model", found, list(findings), [], {}, dict(seconds=1.0, looked_for=["dead"]), **more)


def lines_of(report, **options):
    out = io.StringIO()
    report.show(out, **options)
    return out.getvalue().splitlines()


def three_faults(layers=24, heads=16):
    late = [(i, h) for i in range(layers // 2, layers) for h in range(heads)]
    return make(layers, heads, [
        finding("RG301", late), finding("RG304", [(5, 0)]), finding("RG305", [(8, 0), (8, 1)]),
        finding("RG302", [(2, 3)]),
    ])  # fmt: skip


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 4), (24, 16), (96, 128)])
def test_any_model_fits_into_23_lines_of_80_columns(layers, heads):
    places = [(i, h) for i in range(layers // 2, layers) for h in range(heads)]
    codes = ("RG301", "RG302", "RG303", "RG304", "RG305")
    report = make(layers, heads, [finding(code, places) for code in codes])
    lines = lines_of(report, page="report.html")
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert lines[-1] == "page      report.html"


def test_three_faults_stand_apart_and_the_map_says_where_each_starts():
    lines = lines_of(three_faults())
    text = "\n".join(lines)
    assert "layers.12–23, all heads" in text and "RG301" in text
    assert any(line.split()[:2] == ["12–23", "1" * 16] and "1 starts here" in line for line in lines)
    assert "also      1 more cause:" in text


def test_marks_of_a_whole_model_do_not_cover_those_of_heads():
    whole = finding("RG801", [], scope="model")
    report = make(4, 4, [whole, finding("RG304", [(1, 2)])])
    rows = screen.make_rows(report, report.diagnosis, 12)
    assert [row.marks for row in rows if 1 in row.indices] == ["··2·"]
    assert "the whole model" in "\n".join(lines_of(report))


def test_a_sound_model_an_unfinished_one_and_one_without_heads_say_so():
    assert lines_of(make(2, 2))[1].startswith("✓ NO PROBLEM FOUND")
    assert lines_of(replace(make(2, 2), interrupted="KeyboardInterrupt"))[1].startswith("✗ NOT FINISHED")
    assert lines_of(make(0, 0))[1].startswith("– NOTHING MEASURED")


def test_the_verdict_names_the_gravest_cause_and_notes_are_no_first_step():
    assert lines_of(three_faults())[1].endswith("4 causes, the gravest: exploding logits since layers.12")
    note = replace(finding("RG306", [(0, 0)]), severity="note")
    text = "\n".join(lines_of(make(2, 2, [note])))
    assert "✓ NO PROBLEM FOUND" in text and "noted     RG306" in text and "do first" not in text


def test_checks_that_ran_out_of_time_are_in_the_verdict_which_is_not_sound():
    late = [("padding", "no batch has padding"), ("later tokens", "out of time: 18 s had passed")]
    report = make(2, 2, checks=Checks(["a", "b"], late))
    lines = lines_of(report)
    assert lines[1] == "– NO PROBLEM FOUND in these 3 checks (1 check ran out of time)."
    assert "3 checks made, 2 not, 1 out of time: give more with --seconds" in " ".join(map(str.strip, lines))
    assert screen.describe_skipped(report, True).endswith(": later tokens; padding")
    header = report_page._header(report)
    assert ">checks ran out of time<" in header and "(1 check ran out of time)" in header
    assert "3 checks made, 2 not, 1 out of time: give more with --seconds: later tokens; padding" in header
    sound = replace(report, checks=Checks(["a", "b"], late[:1]))
    assert lines_of(sound)[1] == "✓ NO PROBLEM FOUND in these 3 checks."
    assert any("3 checks made, 1 not" in line for line in lines_of(sound))


def test_layers_of_other_widths_are_never_folded_into_one():
    report = make(2, 4)
    report.heads.append(head("layers.2", 2, 0))
    assert [len(row.marks) for row in screen.make_rows(report, [], 1)] == [4]
    assert [row.indices for row in screen.make_rows(report, [], 12)][-1] == [2]


def test_layers_whose_marks_differ_are_never_folded_and_those_without_room_are_named():
    report = make(11, 4, [finding("RG304", [(4, h) for h in range(4)])])
    for most in (3, 12):
        rows = screen.make_rows(report, report.diagnosis, most)
        assert [row.indices for row in rows if "1" in row.marks] == [[4]]
        assert sum(len(row.indices) for row in rows) == 11
    report = make(40, 4, [finding("RG304", [(i, 0) for i in range(1, 40, 2)])])  # every other layer: no two are alike
    lines = lines_of(report)
    assert len(lines) <= 23 and any(line.split()[:2] == ["1", "1···"] for line in lines)
    assert sum("1···" in line for line in lines) == sum("1···" in line or "····" in line for line in lines) > 1
    assert any("have no room here" in line and "layers 0, 2, 4" in line for line in lines)


def test_text_wraps_at_words_with_a_hanging_indent_and_is_never_coloured_in_a_pipe():
    out = io.StringIO()
    writer = Writer(out)
    for text, style in writer.list_field("found", "word " * 40):
        writer.line(text, style)
    writer.line("long " * 40, "red", most=1)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 == writer.lines and all(len(line) <= 80 for line in lines)
    assert lines[1].startswith(" " * 14 + "word") and lines[1].endswith("…") and "\x1b" not in out.getvalue()
