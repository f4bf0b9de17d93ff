"""The results that ship: made of their records, of three seeds or more, with nothing of the machine's in them."""

import json

import pytest

from regard.lab import training
from regard.lab.training.results import SHIPPED, collect

NAMES = [name for name in training.names() if training.has_shipped(name)]


def test_there_are_results_and_each_has_an_experiment():
    assert NAMES and sorted(path.stem for path in SHIPPED.glob("*.json")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_result_is_what_its_records_say(name):
    result, experiment = training.shipped(name), training.get(name)
    again = collect(experiment, "full", result["records"], result["how"]["command"])
    assert json.loads(json.dumps(again)) == result
    plan = experiment.presets["full"]
    for record in result["records"]:
        assert record["steps"] == plan.steps and record["preset"] == "full"
        sizes = {**plan.sizes, **experiment.variants[record["variant"]]}
        assert record["options"] == json.loads(json.dumps(sizes))  # the experiment as it stands is the one that ran
    assert all(told["runs"] >= 3 for told in result["summary"].values())
    assert list(result["summary"]) == list(experiment.variants)


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
