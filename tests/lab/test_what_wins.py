"""What wins?: the arithmetic of the comparison, equal parameters, and the script from training to tables, tiny."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from regard_lab import training
from regard_lab.estimate import Estimate
from regard_lab.training import comparison, loop
from regard_lab.training.trials import attention
from regard_lab.training.trials.attention import make_attention, mlp_width
from regard_lab.training.trials.language import Block

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "what_wins.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("what_wins", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_result(metric="loss", **values):
    """A result with one record per value, seeds counted from 0; None: a run that diverged."""
    records = [
        dict(variant=name, seed=seed, diverged=x is None, final=None if x is None else {metric: x})
        for name, runs in values.items()
        for seed, x in enumerate(runs)
    ]
    summary = {}
    for name, runs in values.items():
        real = [x for x in runs if x is not None]
        summary[name] = dict(runs=len(runs), diverged=len(runs) - len(real), parameters=1_500_000)
        if real:
            summary[name][metric] = dict(mean=sum(real) / len(real))
    return dict(metric=metric, how=dict(level=0.95), records=records, summary=summary)


def test_the_difference_is_paired_by_seed_with_students_interval():
    result = make_result(softmax=[1.0, 2.0, 3.0, 4.0, 5.0], other=[1.1, 2.3, 3.2, 4.3, 5.1])
    difference = comparison.compare(result)["other"]
    # differences .1 .3 .2 .3 .1: mean .2, s = .1, t(0.975, 4) = 2.776445, half = .2776445 / √5 = .124166
    assert difference.value == pytest.approx(0.2)
    assert (difference.low, difference.high) == pytest.approx((0.2 - 0.124166, 0.2 + 0.124166), abs=1e-6)


def test_a_diverged_seed_leaves_its_pair_out():
    result = make_result(softmax=[1.0, 2.0, 3.0], other=[1.1, None, 3.3], only=[1.0, None, None])
    assert comparison.compare(result)["other"].value == pytest.approx(0.2)
    result["records"][0]["final"]["window_losses"] = []
    assert "only" not in comparison.compare(result)


def test_one_run_each_is_compared_window_by_window():
    result = make_result(softmax=[2.0], other=[1.9])
    for record, windows in zip(result["records"], ([1.0, 2.0, 3.0], [0.8, 1.9, 3.0]), strict=True):
        record["final"]["window_losses"] = windows
    difference = comparison.compare(result)["other"]
    # −.2 −.1 0: mean −.1, s = .1, t(0.975, 2) = 4.302653, half = .4302653 / √3 = .248414
    assert difference.value == pytest.approx(-0.1)
    assert (difference.low, difference.high) == pytest.approx((-0.1 - 0.248414, -0.1 + 0.248414), abs=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "for_loss", "for_bleu"),
    [(0.1, 0.3, "worse", "better"), (-0.3, -0.1, "better", "worse"), (-0.1, 0.3, *["not distinguishable"] * 2)],
)
def test_the_verdict_reads_the_interval(low, high, for_loss, for_bleu):
    difference = Estimate((low + high) / 2, low, high)
    assert comparison.describe(difference, lower_is_better=True) == for_loss
    assert comparison.describe(difference, lower_is_better=False) == for_bleu


def test_the_best_come_first_and_diverged_runs_last(script):
    runs = dict(softmax=[2.0, 2.0], a=[1.5, 1.5], b=[1.8, 1.8], c=[1.0, None], d=[None, None])
    assert script.rank(make_result(**runs)) == ["a", "b", "c", "d"]
    assert script.rank(make_result("bleu", **runs)) == ["b", "a", "c", "d"]
    lines = [line.split("|")[1].strip() for line in comparison.table(make_result(**runs)).markdown().splitlines()]
    assert lines[2:] == ["c", "a", "b", "softmax", "d"]


@pytest.mark.parametrize("name", attention.attentions(keys=16))
def test_every_variant_has_softmaxs_parameters(name):
    """Beside vectors and scalars per head: what the attention adds in weights, the MLP has less."""
    counts = []
    for options in ({}, attention.attentions(keys=16)[name]):
        counts.append(sum(p.numel() for p in Block(64, 4, options).parameters()))
    assert abs(counts[1] / counts[0] - 1) < 0.01


def test_a_larger_attention_has_a_narrower_mlp():
    layer = make_attention(16, 2, {}, "causal")
    assert mlp_width(16, layer) == 64
    layer.gate = torch.nn.Linear(16, 16, bias=False)  # 16² weights, as 8 hidden units have
    assert mlp_width(16, layer) == 56


@pytest.mark.parametrize(("needs", "served"), [("causal", 1), ("self", 2), ("any", 3)])
def test_options_for_some_attention_are_left_out_elsewhere(needs, served):
    options = {"normalizer": "entmax15", "needs": needs}
    found = [make_attention(16, 2, options, place).normalizer for place in ("causal", "self", "cross")]
    assert found == ["entmax15"] * served + ["softmax"] * (3 - served)


def test_seeds_that_train_by_turns_end_as_they_would_alone(script, tmp_path, one_thread):
    experiment = script.find_experiment("variants", tiny=True)
    together = loop.run_together(experiment, "full", "ssmax", [0, 1], tmp_path / "together", pause=float("inf"))
    for seed, record in enumerate(together):
        alone = loop.run(experiment, "full", "ssmax", seed, tmp_path / "alone", pause=float("inf"))
        assert record["seed"] == seed and record["history"] == alone["history"]


EXPERIMENTS = ("variants", "variants-translation", "variants-length", "variants-recall", "variants-large")


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory):
    """The folder of results of every part: softmax and ssmax, three seeds of two steps."""
    folder = tmp_path_factory.mktemp("what-wins")
    sources = folder / "sources"
    sources.mkdir()
    for i, text in enumerate(("import this\n" * 4000, "import that\n" * 4000, "import that\n" * 4000)):
        (sources / f"{i}.py").write_text(text)
    places = ["--out", str(folder / "out"), "--work", str(folder / "work")]
    (folder / "work").mkdir()
    script.write_corpus(folder / "work" / script.CORPUS, [sources])
    for name in ("softmax", "ssmax"):
        chosen = ["--run", ",".join(EXPERIMENTS), name, "--tiny", "--device", "cpu", "--seeds", "3"]
        assert script.main(["list", *chosen, *places]) == 0
    # what is trained already is read, so that the processes of the parts end at once
    words = ["--tiny", "--device", "cpu", "--seeds", "3", "--only", "softmax", "--workers", "1", "--budget", "300"]
    assert script.main(["large", *words, *places]) == 0
    return folder


def test_a_content_that_stands_twice_is_written_once(trained, script):
    assert (trained / "work" / script.CORPUS).stat().st_size == 2 * 4000 * 12 + 1


def test_a_part_writes_results_and_why_others_are_left_out(trained):
    result = json.loads((trained / "out" / "variants-large.json").read_text())
    assert list(result["summary"]) == ["softmax", "ssmax"]  # the record of ssmax was there
    left_out = result["how"]["left_out"]
    assert left_out["entmax15"] == "not chosen" and "softmax" not in left_out
    assert set(result["summary"]) | set(left_out) == set(training.get("variants-large").variants)
    assert str(trained) not in json.dumps(result)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_has_a_table_and_figures(trained, script, name, capsys):
    experiment = script.find_experiment(name, tiny=True)
    options = script.argparse.Namespace(out=trained / "tables", work=trained / "work")
    options.out.mkdir(exist_ok=True)
    script.write_results({name: experiment}, {}, options)
    script.show_tables(options.out, ship=False)
    told = capsys.readouterr().out
    assert f"## {name}\n" in told and "ssmax" in told
    result = json.loads((options.out / f"{name}.json").read_text())
    assert [r["seed"] for r in result["records"]] == [0, 1, 2] * 2
    assert result["how"]["command"].startswith(f"regard lab train {name} --preset full")
    assert all(len(figure.alt) > 20 for figure in training.get(name).figures(result).values())


def test_what_fails_is_named_with_its_error(script, tmp_path):
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "relu.txt").write_text("Traceback\n  File\nRuntimeError: out of memory\n")
    assert script.read_error(tmp_path, "relu") == "RuntimeError: out of memory"


def test_an_unknown_variant_is_refused_before_any_part_runs(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["small", "length", "--only", "softmax", "relu", "--out", str(tmp_path), "--work", str(tmp_path)])
    assert "--only relu: length has softmax, " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_large_asks_for_small_first(script, tmp_path):
    with pytest.raises(SystemExit, match="large takes the best of small: run small first"):
        script.main(["large", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--work", str(tmp_path)])
