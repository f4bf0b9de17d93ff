"""The results that ship: made of their records, of three seeds or more, with nothing of the machine's in them."""

import json
import re
from pathlib import Path

import pytest
import regard_lab as lab
from regard_lab import training
from regard_lab.estimate import Estimate
from regard_lab.training import timing
from regard_lab.training.command import table
from regard_lab.training.results import SHIPPED, collect, group_by_sign, sign_of

NAMES = [name for name in training.names() if training.has_shipped(name)]


def test_there_are_results_and_each_has_an_experiment():
    assert NAMES and sorted(path.stem for path in SHIPPED.glob("*.json")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_result_is_what_its_records_say(name):
    result, experiment = training.shipped(name), training.get(name)
    left_out = result["how"].get("left_out", {})
    again = collect(experiment, "full", result["records"], result["how"]["command"], left_out)
    assert json.loads(json.dumps(again)) == result
    plan = experiment.presets["full"]
    for record in result["records"]:
        assert record["steps"] == plan.steps and record["preset"] == "full"
        sizes = {**plan.sizes, **experiment.variants[record["variant"]]}
        assert record["options"] == json.loads(json.dumps(sizes))  # the experiment as it stands is the one that ran
    assert all(told["runs"] >= (1 if plan.seeds < 3 else 3) for told in result["summary"].values())
    assert list(result["summary"]) == [name for name in experiment.variants if name not in left_out]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_result_says_how_and_not_where_on_a_disk(name):
    how = training.shipped(name)["how"]
    assert how["command"].startswith(f"regard lab train {name} --preset full")
    assert how["where"] and how["data"]
    text = (SHIPPED / f"{name}.json").read_text(encoding="utf-8")
    assert "/work" not in text and "/tmp" not in text and "/home" not in text


def test_an_experiment_without_a_result_says_so():
    with pytest.raises(ValueError, match="'nothing' has no shipped result; run `regard lab train nothing"):
        training.shipped("nothing")


def test_what_the_seeds_settle_is_read_from_the_interval():
    ahead, behind, open_ = Estimate(0.3, 0.2, 0.4), Estimate(-0.3, -0.4, -0.2), Estimate(0.1, -0.1, 0.3)
    assert [sign_of(e) for e in (ahead, behind, open_)] == [1, -1, 0]
    told = group_by_sign({"a": ahead, "b": open_, "c": Estimate(2.0, 1.0, 3.0)})
    assert told == {1: "a +0.30 ± 0.10, c +2.0 ± 1.0", -1: "none", 0: "b +0.10 ± 0.20"}


@pytest.mark.parametrize("path", sorted((SHIPPED / "times").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_times_are_of_every_variant(path):
    told = timing.shipped_times(path.stem)
    assert list(told["times"]) == list(training.get(path.stem).variants) and "/" not in told["where"]
    assert all(0 < t["low"] <= t["median"] <= t["high"] for t in told["times"].values())
    first, *rows = timing.table("", told["times"]).markdown().splitlines()[2:]
    assert first.endswith("| 1.00 |") and len(rows) == len(told["times"]) - 1


def test_the_retrieval_table_has_the_papers_numbers_beside_ours():
    lines = [line.split("|")[1:-1] for line in table(training.shipped("retrieval")).markdown().splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    assert cells["paper, with its polynomial"] == ["98.6", "94.5", "82.1", "57.7", "24.9", "14.0"]
    refit = training.shipped("retrieval")["summary"]["softmax"]["refit@4096"]["mean"]
    assert cells["ours, with the refit"][4].startswith(f"{refit:.1f} ± ")
    assert cells["refit − published polynomial"][3].startswith("+")


def test_normalisers_are_told_with_the_parameters_they_ran_with():
    finding = lab.run("compare-normalizers").finding
    for part in ("entmax(alpha=1.25) +0.0", "sigmoid(bias=-4.852) +0.0", "sigmoid(bias=-2.773) -2.4"):
        assert part in finding.remark
    assert any("entmax(alpha=1.25)'s loss" in check.what for check in finding.checks)
    words = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    assert all(part in words for part in ("entmax has α = 1.25", "−4.852", "−2.773"))


def test_normalisers_that_all_fall_short_refute_the_claim(monkeypatch):
    result = json.loads(json.dumps(training.shipped("normalizers")))
    for record in result["records"]:
        record["final"]["loss"] += float(record["variant"] != "softmax")
    others = {name: training.shipped(name) for name in NAMES if name != "normalizers"}
    monkeypatch.setattr(training, "shipped", {**others, "normalizers": result}.__getitem__)
    told = lab.run("compare-normalizers")
    assert told.verdict == "wrong" and told.right.startswith("None does: softmax1 +")


def test_what_the_docs_show_ships():
    pages = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "docs").glob("*.md"))
    shown = {kind: set(re.findall(rf"\[\[{kind}: ([\w-]+)\]\]", pages)) for kind in ("results", "training", "times")}
    assert set(NAMES) <= shown["results"] <= set(training.names())  # every result is told
    drawn = {f"{name}-{title}" for name in NAMES for title in training.get(name).figures(training.shipped(name))}
    assert shown["training"] and shown["training"] <= drawn
    assert shown["times"] == {path.stem for path in (SHIPPED / "times").glob("*.json")}
