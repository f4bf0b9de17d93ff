"""An examination is faithful or silent, keeps what it has when it is broken off, and leaves the model as it was."""

import math

import pytest
import torch
import torch.nn.functional as F
from health_subject import Own, means
from torch import nn

import regard
from regard.health.capture import interception
from regard.health.capture.sdpa_name import SDPA
from regard.health.checks import SEVERITIES
from regard.health.contract import run
from regard.health.examine import examine
from regard.health.measure import norms, recorder


def test_long_rows_are_checked_on_samples_and_go_on_rebuilt(monkeypatch):
    module, x = Own(is_causal=True), torch.randn(1, 40, 12)
    whole = examine(module, [x])
    monkeypatch.setattr(recorder, "WHOLE", 16)
    monkeypatch.setattr(norms, "SAMPLED_ROWS", 8)
    seen = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    sampled = examine(module, [x])
    torch.testing.assert_close(means(sampled, "entropy"), means(whole, "entropy"))
    torch.testing.assert_close(seen[0], module(x).detach(), rtol=1e-4, atol=1e-5)
    assert "on 8 rows" in sampled.how["faithful"]["checked"]


@pytest.mark.parametrize("long", [False, True])
def test_an_unfaithful_layer_is_silent_and_left_alone(monkeypatch, long):
    """The measured path is made wrong on purpose: the layer must lose its numbers, the model must keep its output."""
    if long:
        monkeypatch.setattr(recorder, "WHOLE", 4)
    module, x = nn.Sequential(Own()), torch.randn(1, 9, 12)
    own = module(x)
    right = regard.attention
    monkeypatch.setattr(regard, "attention", lambda q, k, v, **options: right(1.05 * q, k, v, **options))
    seen = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    report = examine(module, [x], checks=False)
    assert report.heads == []
    ((layer, reason),) = report.unmeasured
    assert layer == "0"
    assert "differs by" in reason
    assert len(seen) == (2 if long else 1)  # what went on rebuilt and was wrong is run again
    torch.testing.assert_close(seen[-1], own, rtol=0, atol=0)
    assert examine(module, [x]).findings == []  # our fault is not the model's


def test_nan_is_not_measured():
    report = examine(nn.Sequential(Own()), [torch.full((1, 9, 12), math.nan)])
    assert report.heads == []
    assert "not finite" in report.unmeasured[0][1]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(Own(), nn.Dropout(0.5))
    model.train()
    model[1].eval()
    examine(model, [torch.randn(1, 5, 12)])
    assert model.training
    assert not model[1].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert interception.ACTIVE == []
    assert F.scaled_dot_product_attention is SDPA


def test_an_error_midway_keeps_what_was_measured():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Own(), Own()

        def forward(self, x):
            out = self.a(x)
            if x.shape[1] > 6:
                raise RuntimeError("no more than six tokens")
            return out + self.b(x)

    model = Fragile()
    report = examine(model, [torch.randn(1, 5, 12), torch.randn(1, 8, 12)])
    assert "no more than six tokens" in report.interrupted
    assert "after 1 whole" in report.interrupted
    assert {head.layer: head.statistics["entropy"].count for head in report.heads} == {"a": 13, "b": 5}
    assert interception.ACTIVE == []
    with pytest.raises(RuntimeError, match="six tokens") as failed:
        examine(nn.Sequential(nn.Identity(), _Failing()), [torch.randn(1, 8, 12)])
    notes = getattr(failed.value, "__notes__", None) or [str(failed.value.__cause__)]
    assert notes == ["regard.examine: raised in batch 0, counted from 0"]


class _Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError("no more than six tokens")


def test_control_c_keeps_what_was_measured():
    def batches():
        yield torch.randn(1, 5, 12)
        raise KeyboardInterrupt

    report = examine(Own(), batches())
    assert report.interrupted.startswith("KeyboardInterrupt")
    assert len(report.heads) == 3


def test_the_report_is_there_before_the_checks_which_begin_with_the_gravest(monkeypatch):
    early, begun = [], []

    def note(module, trial, *others):
        begun.append(min(SEVERITIES.index(rule.severity) for rule in module.RULES))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return check(module, trial, *others)

    check = run._check
    monkeypatch.setattr(run, "_check", note)
    report = examine(Own(), [torch.randn(1, 5, 12)], measured=early.append)
    assert [len(one.heads) for one in early] == [3] and early[0].interrupted == "the checks did not end"
    assert begun == [0, 0, 0] and report.interrupted.startswith("KeyboardInterrupt (after ")


def test_checks_end_when_their_time_is_over():
    with pytest.raises(ValueError, match="seconds must be above 0"):
        examine(Own(), [torch.randn(1, 5, 12)], seconds=0.0)
    report = examine(Own(), [torch.randn(1, 5, 12)], ablate=False, seconds=1e-9)
    assert report.checks.done == [] and {why.split(":")[0] for _, why in report.checks.reasons} == {"out of time"}


@pytest.mark.parametrize(
    ("model", "batches", "error", "match"),
    [
        (nn.Linear(3, 3), [torch.randn(2, 3)], ValueError, "no attention was found in Linear"),
        (Own(), [], ValueError, "batches is empty"),
        (Own(), 7, TypeError, "batches must be an iterable"),
        (Own(), "a text", TypeError, "got text; tokenize it"),
        (Own(), ["a text"], TypeError, "got text; tokenize it"),
        ("model", [], TypeError, "model must be a torch.nn.Module"),
    ],
)
def test_bad_input_is_reported(model, batches, error, match):
    with pytest.raises(error, match=match):
        examine(model, batches)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own TorchScript
def test_torchscript_is_reported_by_its_name():
    model = torch.jit.trace(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(TypeError, match="model is TorchScript"):
        examine(model, [torch.randn(2, 3)])
