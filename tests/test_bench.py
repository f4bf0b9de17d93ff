"""The benchmarks of one machine: what they print and write, and how they fail."""

import json
from dataclasses import replace
from functools import partial

import bench
import pytest
import torch
from bench import attention, measure, rows, small
from bench.__main__ import COMMANDS
from bench.measure import Case, Result

from regard import cli, normalizers

FUSED = [name for name in normalizers.names() if normalizers.get(name).fused]
main = partial(cli.main, commands=COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "columns"], "rows"),
        (["bench", "--markdown", "no/such/folder/x.md"], "no/such/folder"),
        (["bench", "--markdown", "."], "'.' is a folder"),
        (["bench", "accuracy", "--markdown", "no/such/folder/x.md"], "no/such/folder"),
        (["bench", "accuracy", "--markdown", "."], "'.' is a folder"),
    ],
)
def test_a_bad_command_line_is_one_line_and_status_2(words, says, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert says in err


def test_bench_measures_each_candidate_and_survives_a_failing_one():
    candidates = dict(regard=lambda: None, torch=lambda: None, other=lambda: 1 / 0)
    [result] = measure.run([Case("work", lambda: candidates)], "cpu", rounds=1)
    assert set(result.values) == {"regard", "torch"}
    assert result.failures == {"other": "ZeroDivisionError: division by zero"}
    table = measure.table([replace(result, values={"regard": 3e-3, "torch": 2e-3})], "title")
    assert table.columns == ["work", "regard", "torch", "other", "regard's time"]
    assert table.rows == [["work", "3 ms", "2 ms", "failed", "1.5× torch"]]


def test_what_bench_times_on_a_cpu_runs_and_agrees(monkeypatch):
    """One that fails is a word in a table: here every candidate runs, on few rows, and those of softmax agree."""
    monkeypatch.setattr(rows, "ELEMENTS", 2048)
    monkeypatch.setattr(rows, "_entmax_package", lambda name: None)  # timed where it is installed
    tiny = attention.Shape(1, 2, 16, 8, causal=True)
    found = [(case.work, case.prepare()) for case in rows.cases("cpu", quick=True)]
    for case in attention.cases("cpu", quick=True):
        found.append((case.work, partial(case.prepare.func, **{**case.prepare.keywords, "shape": tiny})()))
    found += [(case.work, case.prepare()) for case in small.cases("cpu", quick=True)]
    assert len(found) >= 2 * len(FUSED) + 9
    for work, candidates in found:
        made = {name: candidate() for name, candidate in candidates.items()}
        first = {name: x[0] if isinstance(x, tuple) else x for name, x in made.items()}
        if work.startswith(("softmax ", "softmax,")):
            for theirs in first.values():
                torch.testing.assert_close(first["regard"], theirs, msg=work)
        assert all(x.isfinite().all() for x in first.values())


def test_bench_takes_the_median_of_rounds_that_alternate(monkeypatch):
    order, ticks = [], iter(range(10_000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(ticks)) * 1e-3)
    calls = {name: (lambda name=name: order.append(name)) for name in ("regard", "torch")}
    [result] = measure.run([Case("work", lambda: calls)], "cpu", rounds=2)
    assert result.values == pytest.approx({"regard": 1e-3, "torch": 1e-3})
    burst = 1 + measure.BURST
    assert order[4:] == (["regard"] * burst + ["torch"] * burst) * 2


def test_bench_divides_a_sample_by_its_calls(monkeypatch):
    made, ticks = [], iter(range(10_000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(ticks)) * 1e-3)
    [result] = measure.run([Case("work", lambda: {"regard": lambda: made.append(1)}, calls=10)], "cpu", rounds=1)
    assert result.values == pytest.approx({"regard": 1e-4})
    assert len(made) == 1 + 10 * (2 + measure.BURST)


@pytest.fixture
def tiny_bench(monkeypatch):
    """`python -m bench` with made-up cases in place of minutes of work."""
    made = {}
    monkeypatch.setattr(bench, "run", lambda part, device, quick: made[part])
    return made


def test_bench_prints_and_writes_its_tables(tiny_bench, tmp_path, capsys):
    tiny_bench["rows"] = [Result("softmax", {"regard": 1e-3, "torch": 2e-3}, {})]
    tiny_bench["attention"] = [Result("causal", {"regard": 4e-3, "torch": 2e-3}, {})]
    tiny_bench["small"] = []
    written = tmp_path / "cpu.md"
    assert main(["bench", "--device", "cpu", "--markdown", str(written)]) == 0
    out = capsys.readouterr().out
    assert "0.5× torch" in out
    assert "2× torch" in out
    text = written.read_text(encoding="utf-8")
    assert "- torch: " in text
    assert "- commit: " in text
    assert "| causal | 4 ms | 2 ms | 2× torch |" in text


def test_bench_json(tiny_bench, capsys):
    tiny_bench["rows"] = [Result("softmax", {"regard": 1e-3, "torch": 2e-3}, {})]
    assert main(["bench", "rows", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["values"] == {"regard": 1.0, "torch": 2.0}
    assert "attention" not in found
    assert {"device", "torch", "commit"} <= found["machine"].keys()


@pytest.mark.parametrize(("load", "warns"), [(0.05, False), (1.5, True)])
def test_bench_says_when_the_machine_was_busy(tiny_bench, capsys, monkeypatch, load, warns):
    tiny_bench["rows"] = [Result("softmax", {"regard": 1e-3, "torch": 2e-3}, {})]
    monkeypatch.setattr(bench.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert main(["bench", "rows", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert ("load average was 1.50" in err) == warns and f"load before {load:.2f}" in out


def test_bench_fails_when_regard_itself_failed(tiny_bench, capsys):
    tiny_bench["rows"] = [Result("softmax", {"torch": 2e-3}, {"regard": "RuntimeError: no"})]
    assert main(["bench", "rows", "--device", "cpu"]) == 1
    assert "RuntimeError: no" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["rows", "attention"])
def test_bench_cases_cover_every_normaliser_and_the_statistics(part):
    module = {"rows": rows, "attention": attention}[part]
    work = [case.work for case in module.cases("cpu", quick=False)]
    if part == "rows":
        for name in FUSED:
            for direction in ("forward", "backward"):
                assert any(line.startswith(f"{name} {direction} 4096 × 1024") for line in work)
        assert {"sparsemax forward 65536 × 64", "entmax15 forward 128 × 32768"} <= set(work)
    else:
        assert any("softmax + all statistics, forward B1 H8 N2048 d64 causal" in line for line in work)
    assert len(module.cases("cpu", quick=True)) < len(work)
