"""regard.Monitor: the right steps, the right numbers, where they were asked for, and a warning in time."""

import copy
import io
import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import regard
from regard.health import AttentionWarning
from regard.health.capture import interception
from regard.health.watching import sampling
from regard.health.watching.symptoms import SAMPLES


def layer(dropout=0.1):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)


def per_head(rows):
    """The rows of heads among those of samples and alarms."""
    return [row for row in rows if "head" in row]


def train(model, steps, batch=3):
    for _ in range(steps):
        model(torch.randn(batch, 10, 16)).square().mean().backward()


def test_steps_are_sampled_and_numbers_are_those_of_the_model():
    model, rows = layer(), []
    x = torch.randn(3, 10, 16)
    with regard.Monitor(model, every=3, log=rows.append, heads=True, budget=1.0) as monitor:
        for _ in range(7):
            model(x)
    samples, rows = [row for row in rows if "head" not in row], per_head(rows)
    assert [row["step"] for row in rows] == [1, 1, 4, 4, 7, 7] and [row["step"] for row in samples] == [1, 4, 7]
    assert monitor.unmeasured == {}  # dropout in training did not make it unfaithful
    report = regard.examine(model, [x[:1]])
    for row, head in zip(rows[:2], report.heads, strict=True):
        assert row["layer"] == head.layer == "self_attn"
        assert row["entropy_ratio"] == pytest.approx(head.statistics["entropy_ratio"].mean, rel=1e-5)
        assert row["max_logit"] == pytest.approx(head.statistics["max_logit"].max, rel=1e-5)
    ratios = [head.statistics["entropy_ratio"].mean for head in report.heads]
    tops = [head.statistics["max_logit"].max for head in report.heads]
    gains = [head.statistics["gradient_gain"].mean for head in report.heads]
    expected = dict(max_logit=max(tops), entropy_ratio_min=min(ratios), entropy_ratio_mean=sum(ratios) / 2)
    q = nn.functional.linear(x[:1], model.self_attn.in_proj_weight, model.self_attn.in_proj_bias).unflatten(
        -1, (3, 2, 8)
    )
    norms = q.norm(dim=-1).mean((0, 1, 3)).tolist()
    expected |= dict(gradient_gain=sum(gains) / 2, sink_rate=0.0, q_norm=norms[0], k_norm=norms[1], v_norm=norms[2])
    for prefix in ("attention", "attention/layer_00"):
        for name, number in expected.items():
            assert samples[0][f"{prefix}/{name}"] == pytest.approx(number, rel=1e-5), name
    assert monitor.layers == {"layer_00": "self_attn"} and samples[0]["attention/alarms"] == 0


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
    assert interception.ACTIVE == []


@pytest.mark.parametrize("watch", [lambda model: regard.Monitor(model, every=1, budget=1.0), regard.qk_clip])
def test_random_numbers_of_the_training_are_left_alone(watch):
    """torch's attention is asked for its weights by default, and is then run twice."""
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
        if watched:
            watch(attention)
        torch.manual_seed(1)
        x = torch.randn(3, 10, 16)
        found.append(torch.stack([attention(x, x, x)[0] for _ in range(3)]))
    assert torch.equal(*found)
    assert found[1].requires_grad


def test_a_layer_that_is_not_faithful_keeps_its_own_output(monkeypatch):
    """Of a frozen model too, whose long calls `examine` would lead elsewhere, and run again."""
    from transformers import LlamaConfig, LlamaModel
    from transformers.models.llama import modeling_llama

    def eager_attention_forward(*args, **kwargs):
        output, weights = own(*args, **kwargs)
        return 0.5 * output, weights

    own = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    model = LlamaModel(LlamaConfig(**sizes, attn_implementation="eager")).requires_grad_(False).train()
    ids = torch.randint(20, (1, 300))
    expected = model(ids)[0]
    with regard.Monitor(model, every=1), pytest.warns(AttentionWarning, match="differs by 1 from the model's own"):
        seen = model(ids)[0]
    assert torch.equal(seen, expected)


def test_a_forward_that_raises_is_no_sample():
    """And nothing is message of it: it may have raised before any attention."""
    model, rows = layer(), []
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0) as monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrong in (torch.randn(1, 10, 15), "text"):
            with pytest.raises((RuntimeError, AssertionError, AttributeError)):
                model(wrong)
        assert (rows, monitor.samples) == ([], 0)
        train(model, 1)
    assert len(rows) == 1 and interception.ACTIVE == interception.STATE.scopes == []


def test_evaluation_is_not_a_step():
    model, rows = layer(), []
    monitor = regard.Monitor(model, every=1, log=rows.append)
    model.eval()(torch.randn(1, 10, 16))
    assert rows == []
    assert monitor.steps == 0
    monitor.close()
    assert not model._forward_hooks


def test_copies_and_files_of_a_watched_model_are_not_watched():
    model, rows, file = layer(), [], io.BytesIO()
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0) as monitor:
        train(model, 1)
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), copy.copy(model), torch.load(file, weights_only=False)):
            train(other, 1)
            assert other.training and (monitor.steps, len(rows)) == (1, 1)
            with regard.Monitor(other, every=1, budget=1.0) as another:
                train(other, 1)
            assert another.samples == 1
        train(model, 1)
    assert (monitor.steps, len(rows)) == (2, 2)


def test_its_cost_stays_within_the_budget():
    model, rows = layer(), []
    with regard.Monitor(model, every=1, log=rows.append, budget=1e-9) as monitor:
        train(model, 5)
    assert {row["step"] for row in rows} == {1, 2}  # the first is free, the second spends all there is
    assert monitor.spent > 0
    assert monitor.left_out == 3


def test_samples_that_the_budget_leaves_out_are_told_of_once():
    model = layer()
    with regard.Monitor(model, every=1, budget=1e-9) as monitor, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, 30)
    (message,) = (str(one.message) for one in seen)
    assert message.startswith("Monitor skipped 20 of 22 samples to stay within budget=1e-09: measuring took ")
    assert "What happens in skipped steps is not seen" in message
    assert (monitor.samples, monitor.left_out) == (2, 28)


def test_a_jsonl_file(tmp_path):
    path = tmp_path / "heads.jsonl"
    with regard.Monitor(layer(), every=2, log=path, heads=True, budget=1.0) as monitor:
        train(monitor.model, 3)
    rows = per_head(json.loads(line) for line in path.read_text().splitlines())
    assert [(row["step"], row["head"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert 0.0 < rows[0]["entropy_ratio"] <= 1.0
    with pytest.raises(ValueError, match="there is no folder"):
        regard.Monitor(layer(), log=tmp_path / "none" / "heads.jsonl")


@pytest.mark.parametrize("way", ["full disk", "folder gone", "function"])
def test_a_log_that_fails_is_told_once_and_training_goes_on(way, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()

    def log(row):
        raise KeyError("nothing to write to")

    log = {"full disk": "/dev/full", "folder gone": folder / "heads.jsonl", "function": log}[way]
    if way == "full disk" and not Path(log).exists():
        pytest.skip("this system has no /dev/full")
    with regard.Monitor(layer(), every=1, log=log, budget=1.0) as monitor:
        folder.rmdir()
        with pytest.warns(AttentionWarning, match="The monitor's log failed at step 1") as seen:
            train(monitor.model, 3)
    assert len(seen) == 1 and monitor.samples == 3


def test_what_a_sample_does_not_have_is_no_number(tmp_path):
    rows, board, path = [], Scalars(), tmp_path / "heads.jsonl"
    for log in (rows.append, board, path):
        with regard.Monitor(layer(), every=1, log=log, heads=True, budget=1.0) as monitor:
            monitor.model(torch.randn(2, 1, 16))  # rows of one key have neither an entropy ratio nor a gain ratio
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0]["attention/entropy_ratio_min"] is None and lines[1]["max_weight"] == 1.0
    assert lines[1]["entropy_ratio"] is lines[1]["gain_ratio"] is None
    assert math.isnan(rows[0]["attention/entropy_ratio_min"]) and math.isnan(rows[1]["entropy_ratio"])
    names = {name for name, _, _ in board.scalars}
    assert "attention/max_logit" in names and not any("ratio" in name for name in names)


class Scalars:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def test_a_jsonl_file_is_json_where_numbers_overflow(tmp_path):
    model, path = layer(), tmp_path / "heads.jsonl"
    model.self_attn.in_proj_weight.data[:16] *= 1e22  # its logits have a variance that float32 has not
    with regard.Monitor(model, every=1, log=path, heads=True, budget=1.0):
        train(model, 1)
    rows = per_head(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert [row["logit_variance"] for row in rows] == [None, None] and rows[0]["max_logit"] > 1e20


def test_a_rising_logit_is_told_before_it_is_there():
    model = layer(dropout=0.0)
    x = torch.randn(1, 10, 16)
    with regard.Monitor(model, every=1, budget=1.0), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(SAMPLES + 2):  # two that confirm it
            model(x)
            with torch.no_grad():
                model.self_attn.in_proj_weight[:32] *= 1.22
    message = [str(one.message) for one in seen if issubclass(one.category, AttentionWarning)]
    assert any("largest logit" in text and "self_attn, head" in text for text in message)
    top = regard.examine(model, [x]).heads[0].statistics["max_logit"].max
    assert top / 1.22**2 < 100.0
    assert len(message) == len(set(message))


def test_steady_training_is_not_told_anything():
    model = layer(dropout=0.0)
    with regard.Monitor(model, every=1, budget=1.0), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, SAMPLES + 2)


class Training(nn.Module):
    """One attention layer that returns its loss, as a Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.inner = layer()

    def forward(self, x, labels=None):
        return {"loss": self.inner(x).square().mean()}


def samples(count):
    torch.manual_seed(3)
    return [{"x": torch.randn(10, 16), "labels": torch.zeros(())} for _ in range(count)]


def test_a_trainer_brings_its_steps_and_its_end(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    monkeypatch.delitem(
        sys.modules, "marimo", raising=False
    )  # where it is loaded, transformers takes us for a notebook
    from transformers import Trainer, TrainingArguments

    model, rows = Training(), []
    monitor = regard.Monitor(model, every=3, log=rows.append, budget=1.0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=7, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=samples(32), callbacks=[monitor.trainer_callback()]).train()
    assert [row["step"] for row in rows] == [1, 4, 7]
    assert monitor.steps == 7  # and not 14, the number of forwards
    assert monitor.unmeasured == {}
    assert not model._forward_hooks
    trainer = Trainer(model, arguments, train_dataset=samples(32))
    monitor = regard.Monitor(model, every=3, log=trainer, budget=1.0)
    trainer.add_callback(monitor.trainer_callback())
    for steps in (1, 2):  # a second train() is watched too
        trainer.train()
        logged = [row["attention/step"] for row in trainer.state.log_history if "attention/max_logit" in row]
        assert logged == [1, 4, 7] and monitor.samples == 3 * steps


def fitted(tmp_path, watched, **options):
    """A LightningModule whose training_step calls its model, fitted under a monitor of the part `watched` gives."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Training()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    task, rows = Task(), []
    monitor = regard.Monitor(watched(task), every=3, log=rows.append, budget=1.0)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path), callbacks=[monitor.lightning_callback()], **options,
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(samples(32), batch_size=2))
    assert not monitor.model._forward_hooks
    return monitor, rows


@pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers and much else
def test_lightning_brings_its_steps_and_its_end(tmp_path):
    monitor, rows = fitted(tmp_path, lambda task: task.model, max_steps=7, accumulate_grad_batches=2)
    assert [row["step"] for row in rows] == [1, 4, 7]
    assert monitor.steps == 7


@pytest.mark.filterwarnings("ignore")
def test_a_module_whose_forward_the_trainer_does_not_call_is_told(tmp_path):
    with pytest.warns(AttentionWarning, match="3 steps without a forward") as seen:
        _, rows = fitted(tmp_path, lambda task: task, max_steps=6)
    assert rows == [] and sum(issubclass(one.category, AttentionWarning) for one in seen) == 1


def test_steps_without_a_forward_may_be_few():
    with warnings.catch_warnings(), regard.Monitor(layer(), every=1) as monitor:
        warnings.simplefilter("error")
        for step in range(1, 9):
            monitor.at_step(step)
            if step % 3 == 0:
                train(monitor.model, 1)


@pytest.mark.parametrize(
    ("package", "make"), [("lightning", "lightning_callback"), ("transformers", "trainer_callback")]
)
def test_a_callback_without_its_package_says_what_to_install(monkeypatch, package, make):
    for name in (package, f"{package}.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with regard.Monitor(layer(), every=10) as monitor, pytest.raises(ImportError, match="pip install"):
        getattr(monitor, make)()


@pytest.mark.parametrize("options", [dict(every=0), dict(every=2.5), dict(budget=0.0)])
def test_bad_options_are_told(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        regard.Monitor(layer(), **options)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(sequences=0),
        dict(sequences=-1),
        dict(sequences=1.5),
        dict(sequences="all"),
        dict(budget="2 %"),
        dict(every=0),
    ],
)
def test_what_would_watch_nothing_is_refused_by_name(wrong):
    """sequences=0 measured no row of any step, and said nothing."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        regard.Monitor(model, **wrong)
    assert not model._forward_pre_hooks


class Mixed(torch.nn.Module):
    """Attention through transformers' registry, and from its third forward on by torch's own function too."""

    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=9)
        self.inner = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=1, **sizes))
        self.direct, self.forwards = torch.nn.Identity(), 0

    def forward(self, ids):
        self.forwards += 1
        x = self.inner(input_ids=ids).last_hidden_state[:, None]
        return x if self.forwards < 3 else torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_functions_are_followed_again_after_some_samples(monkeypatch):
    """Where transformers' registry sees every call, torch's functions are not followed in each sample."""
    monkeypatch.setattr(sampling.ForwardInterceptions, "EVERY", 4)
    model, seen = Mixed().train(), []
    regard.Monitor(model, every=1, budget=1.0, metrics=("max_logit",), log=lambda values: seen.append(set(values)))
    for _ in range(6):
        model(torch.arange(8)[None])
    layers = [len([name for name in names if name.startswith("attention/layer")]) for names in seen]
    assert layers == [1, 1, 1, 1, 2, 2]
