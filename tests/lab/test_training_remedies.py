"""The experiments retrieval and collapse: what they draw, what they measure, how they go on when killed."""

from dataclasses import replace

import pytest
import torch
from regard_lab import training
from regard_lab.training import loop
from regard_lab.training.experiments import collapse, retrieval

import regard

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(name: str, **changes):
    """An experiment whose small preset is smaller still."""
    whole = training.get(name)
    small = whole.presets["small"]
    sizes = {**small.sizes, **changes.pop("sizes", {})}
    return replace(whole, presets={**whole.presets, "small": replace(small, sizes=sizes, **changes)})


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("name", "variant"), [("collapse", "qk-clip"), ("retrieval-trained", "ssmax")])
def test_a_killed_run_ends_as_a_whole_one(name, variant, tmp_path):
    sizes = {
        "collapse": {"width": 32, "length": 16, "validation": 64},
        "retrieval-trained": {"width": 16, "tests": [16]},
    }[name]
    experiment = tiny(name, steps=12, every=4, sizes={**sizes, "batch": 4})

    def stop(step, loss):
        if step == 8:
            raise Stopped

    whole = loop.run(experiment, "small", variant, 0, tmp_path / "whole")
    with pytest.raises(Stopped):
        loop.run(experiment, "small", variant, 0, tmp_path / "cut", tick=stop)
    again = loop.run(experiment, "small", variant, 0, tmp_path / "cut")
    assert again["history"] == whole["history"] and again["final"] == whole["final"]


def test_what_is_provoked_and_what_relieves_it(tmp_path):
    experiment = tiny("collapse", steps=20, every=20, sizes={"validation": 512})
    ends = {name: loop.run(experiment, "small", name, 0, tmp_path)["final"] for name in ("none", "scale", "qk-clip")}
    assert ends["none"]["entropy_ratio"] < 0.15 < 0.3 < min(ends[n]["entropy_ratio"] for n in ("scale", "qk-clip"))
    assert ends["none"]["max_logit"] > 100.0 > 30.0 > ends["qk-clip"]["max_logit"]


def test_the_answer_is_the_class_of_the_highest_priority():
    priority, kind = retrieval.draw(50, 7, torch.Generator().manual_seed(0))
    right = retrieval.answers(priority, kind)
    for row in range(50):
        assert right[row] == kind[row, max(range(7), key=lambda j: priority[row, j].item())]
    trial = training.get("retrieval").make(training.get("retrieval").setting("small", "softmax", 0, None, "cpu"))
    priority, kind, lengths, right = trial.batch(3)
    assert (priority.count_nonzero(1) <= lengths).all() and lengths.max() == 16 and lengths.min() == 1
    assert torch.equal(right, retrieval.answers(priority, kind))


def test_a_temperature_put_in_afterwards_is_taken_out_again():
    setting = training.get("retrieval").setting("small", "softmax", 0, None, "cpu")
    trial = retrieval.RetrievalTrial(replace(setting, options={**setting.options, "tests": [16, 64], "items": 1024}))
    with torch.no_grad():
        trial.model.attention.q_proj.weight.mul_(30.0)
        found = trial.finish()
    assert sorted(found) == [f"{how}@{n}" for how in ("own", "published", "refit") for n in (16, 64)]
    assert trial.model.attention.temperature is None
    assert list(trial.model.state_dict()) == list(retrieval.Retriever(64, {}).state_dict())


@pytest.mark.parametrize("variant", ["ssmax", "adaptive", "query-dependent", "qk-norm", "entmax15-ssmax"])
def test_every_remedy_is_in_the_model(variant):
    trial = retrieval.RetrievalTrial(training.get("retrieval-trained").setting("small", variant, 0, None, "cpu"))
    attention = trial.model.attention
    assert (variant == "qk-norm") == (attention.score == "cosine")
    assert ("entmax15" in variant) == (attention.normalizer == "entmax15")
    if variant == "adaptive":
        assert attention.temperature.coefficients == regard.temperature.Adaptive.refit
    trial.loss(trial.batch(0)).backward()
    assert all(p.grad is not None for p in trial.model.parameters())


def test_collapse_remedies_are_told_apart():
    made = {name: collapse.CollapseTrial(training.get("collapse").setting("small", name, 0, None, "cpu"))
            for name in training.get("collapse").variants}  # fmt: skip
    assert [name for name, trial in made.items() if trial.threshold] == ["qk-clip"]
    assert [name for name, trial in made.items() if not trial.graph] == ["qk-clip"]
    assert made["softcap"].model.blocks[0].attention.softcap == 20.0


def test_rows_that_are_tested_on_are_never_trained_on():
    trained = [
        retrieval.training_rows(seed, chunk, 2, retrieval.TRAINED)[0] for seed in range(4) for chunk in (0, 16, 64)
    ]
    trained = torch.cat([rows.flatten() for rows in trained])
    for n in (16, 64):
        for seed in range(3):
            tested, _ = retrieval.testing_rows(8, n, seed)
            assert not torch.isin(tested, trained[trained > 0]).any()
    assert not torch.equal(retrieval.testing_rows(8, 16, 0)[0], retrieval.testing_rows(8, 16, 1)[0])
