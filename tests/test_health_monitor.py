"""regard.Monitor: the right steps, the right numbers, where they were asked for, and a warning in time."""

import json
import warnings

import pytest
import torch
from torch import nn

import regard
from regard.health import AttentionWarning, intercept
from regard.health.monitor import SAMPLES


def layer(dropout=0.1):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)


def train(model, steps, batch=3):
    for _ in range(steps):
        model(torch.randn(batch, 10, 16)).square().mean().backward()


def test_steps_are_sampled_and_numbers_are_those_of_the_model():
    model, rows = layer(), []
    x = torch.randn(3, 10, 16)
    with regard.Monitor(model, every=3, log=rows.append, budget=1.0) as monitor:
        for _ in range(7):
            model(x)
    assert [row["step"] for row in rows] == [1, 1, 4, 4, 7, 7]
    assert monitor.unmeasured == {}  # dropout in training did not make it unfaithful
    report = regard.examine(model, [x[:1]])
    for row, head in zip(rows[:2], report.heads, strict=True):
        assert row["layer"] == head.layer == "self_attn"
        assert row["entropy_ratio"] == pytest.approx(head.statistics["entropy_ratio"].mean, rel=1e-5)
        assert row["max_logit"] == pytest.approx(head.statistics["max_logit"].max, rel=1e-5)


def test_training_goes_on_as_without_it():
    grads = []
    for watched in (False, True):
        model = layer(dropout=0.0)
        monitor = regard.Monitor(model, every=1, budget=1.0) if watched else None
        torch.manual_seed(1)
        train(model, 2)
        grads.append(model.self_attn.in_proj_weight.grad.clone())
        if monitor:
            monitor.close()
            assert monitor.samples == 2
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert intercept.ACTIVE == []


def test_evaluation_is_not_a_step():
    model, rows = layer(), []
    monitor = regard.Monitor(model, every=1, log=rows.append)
    model.eval()(torch.randn(1, 10, 16))
    assert rows == []
    assert monitor.step == 0
    monitor.close()
    assert not model._forward_hooks


def test_its_cost_stays_within_the_budget():
    model, rows = layer(), []
    with regard.Monitor(model, every=1, log=rows.append, budget=1e-9) as monitor:
        train(model, 5)
    assert {row["step"] for row in rows} == {1, 2}  # the first is free, the second spends all there is
    assert monitor.spent > 0


def test_a_jsonl_file(tmp_path):
    path = tmp_path / "heads.jsonl"
    with regard.Monitor(layer(), every=2, log=path, budget=1.0) as monitor:
        train(monitor.model, 3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["head"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert 0.0 < rows[0]["entropy_ratio"] <= 1.0
    with pytest.raises(ValueError, match="there is no folder"):
        regard.Monitor(layer(), log=tmp_path / "none" / "heads.jsonl")


class Scalars:
    def __init__(self):
        self.scalars, self.histograms = [], []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def add_histogram(self, name, values, step):
        self.histograms.append((name, len(values), step))


class Run:
    def __init__(self):
        self.logged = []

    def log(self, numbers, step):
        self.logged.append((numbers, step))


def test_writers():
    board, run = Scalars(), Run()
    for log in (board, run):
        with regard.Monitor(layer(), every=5, log=log) as monitor:
            train(monitor.model, 1)
    names = {name for name, _, step in board.scalars if step == 1}
    assert "attention/self_attn/head1/entropy_ratio" in names
    assert ("attention/self_attn/max_logit", 2, 1) in board.histograms
    ((numbers, step),) = run.logged
    assert step == 1
    assert numbers.keys() == names
    with pytest.raises(TypeError, match="log must have add_scalar"):
        regard.Monitor(layer(), log=7)


def test_a_rising_logit_is_told_before_it_is_there():
    model = layer(dropout=0.0)
    x = torch.randn(1, 10, 16)
    with regard.Monitor(model, every=1, budget=1.0), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(SAMPLES):
            model(x)
            with torch.no_grad():
                model.self_attn.in_proj_weight[:32] *= 1.4
    told = [str(one.message) for one in seen if issubclass(one.category, AttentionWarning)]
    assert any("largest logit" in text and "self_attn, head" in text for text in told)
    top = regard.examine(model, [x]).heads[0].statistics["max_logit"].max
    assert top < 100.0 or any("on its way" in text for text in told)
    assert len(told) == len(set(told))


def test_steady_training_is_not_told_anything():
    model = layer(dropout=0.0)
    with regard.Monitor(model, every=1, budget=1.0), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, SAMPLES + 2)


def test_a_trainer_callback_brings_the_trainers_steps():
    pytest.importorskip("transformers")
    from transformers import TrainerControl, TrainerState, TrainingArguments

    model, rows = layer(), []
    monitor = regard.Monitor(model, every=10, log=rows.append, budget=1.0)
    callback = monitor.trainer_callback()
    arguments, state, control = object.__new__(TrainingArguments), TrainerState(), TrainerControl()
    for step in range(21):
        state.global_step = step
        callback.on_step_begin(arguments, state, control)
        train(model, 2)  # two forwards a step, as with gradient accumulation
    callback.on_train_end(arguments, state, control)
    assert sorted({row["step"] for row in rows}) == [1, 11, 21]
    assert len(rows) == 6
    assert not model._forward_hooks


def test_a_lightning_callback_or_what_it_needs(monkeypatch):
    import sys
    import types

    monitor = regard.Monitor(layer(), every=10)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        monitor.lightning_callback()
    package = types.ModuleType("lightning.pytorch")
    package.Callback = object
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
    callback = monitor.lightning_callback()
    callback.on_train_batch_start(types.SimpleNamespace(global_step=29), None, None, 0)
    train(monitor.model, 1)
    assert monitor.step == 30
    callback.on_train_end(None, None)
    assert not monitor.model._forward_hooks


@pytest.mark.parametrize("options", [dict(every=0), dict(every=2.5), dict(budget=0.0)])
def test_bad_options_are_told(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        regard.Monitor(layer(), **options)
