"""Models examined, watched and trained in several threads at once."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.capture import interception


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x


def entropies(model, x) -> list[float]:
    return [head.statistics["entropy"].mean for head in regard.examine(model, [x]).heads]


def at_once(*works) -> list:
    """What each work gave, in its own thread, all begun together."""
    gate, given = threading.Barrier(len(works)), [None] * len(works)

    def run(at):
        gate.wait()
        try:
            given[at] = works[at]()
        except Exception as error:
            given[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return given


def test_three_models_are_examined_at_once():
    models, x = [Model(seed).eval() for seed in range(3)], torch.randn(2, 24, 16)
    alone = [entropies(model, x) for model in models]
    for _ in range(4):
        assert at_once(*(lambda model=model: entropies(model, x) for model in models)) == alone


def test_a_monitor_watches_one_while_another_is_examined():
    trained, other, x = Model(3).train(), Model(4).eval(), torch.randn(2, 24, 16)
    alone, seen = entropies(other, x), []
    monitor = regard.Monitor(trained, every=1, log=lambda *row: seen.append(row), budget=1.0)
    for _ in range(4):
        _, told = at_once(lambda: [trained(x).sum().backward() for _ in range(3)], lambda: entropies(other, x))
        assert told == alone
    assert len(seen) >= 4 and not monitor.unmeasured
    monitor.close()


class Twice(Model):
    """A block that is run again on what it gave."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_what_another_thread_runs_beside_does_not_count():
    model, x = Twice(6).eval(), torch.randn(2, 24, 16)
    alone = [(head.layer, head.statistics["entropy"].count) for head in regard.examine(model, [x] * 4).heads]
    report, _ = at_once(
        lambda: regard.examine(model, [x] * 4), lambda: [model(torch.randn(1, 9, 16)) for _ in range(40)]
    )
    assert [(head.layer, head.statistics["entropy"].count) for head in report.heads] == alone


class Meeting(Model):
    """Two forwards in two threads that wait for each other, after the first layer and before the last."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.gate = threading.Barrier(2)
        for layer in (self.layers[0], self.layers[2]):
            layer.register_forward_hook(self.meet)

    def meet(self, *_) -> None:
        self.gate.wait(timeout=10.0)


def test_a_monitor_of_forwards_that_wait_for_each_other():
    inputs, rows = [torch.randn(1, n, 16) for n in (24, 9)], []
    model = Meeting(7).train()
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0) as monitor:
        monitor.budget = math.inf  # two threads spend more than the time that passes
        for _ in range(3):
            told = at_once(*(lambda x=x: model(x).sum().item() for x in inputs))
            assert all(isinstance(x, float) for x in told), told
    assert monitor.samples == monitor.step == 6 and not monitor.unmeasured and not interception.ACTIVE
    report = [regard.examine(Model(7).eval(), [x]) for x in inputs]
    alone = {round(head.statistics["logit_variance"].mean, 9) for one in report for head in one.heads}
    assert {round(row["logit_variance"], 9) for row in rows} == alone


class Overlap:
    """Two forwards: the second comes to a place while the first is there, and goes on when that has ended."""

    def __init__(self) -> None:
        self.within, self.entered, self.ended = (threading.Event() for _ in range(3))
        self.tasks = {}

    def here(self, *_) -> None:
        """The place."""
        self.tasks.pop(threading.get_ident(), lambda: None)()

    def of(self, first, second) -> list:
        """What each gave."""

        def one():
            self.tasks[threading.get_ident()] = lambda: (self.within.set(), self.entered.wait(10.0))
            try:
                return first()
            finally:
                self.ended.set()

        def other():
            assert self.within.wait(10.0)
            self.tasks[threading.get_ident()] = lambda: (self.entered.set(), self.ended.wait(10.0))
            return second()

        given = at_once(one, other)
        assert self.entered.is_set() and not self.tasks
        return given


class Parent(nn.Module):
    """An attention of its own, after a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(16, 48))

    def forward(self, x):
        q, k, v = self.child(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def test_a_call_belongs_to_its_module_though_another_thread_stops_watching_meanwhile():
    model, x, rows, overlap = Parent().train(), torch.randn(1, 9, 16), [], Overlap()
    model.child[0].register_forward_pre_hook(overlap.here)
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0) as monitor:
        monitor.budget = math.inf
        for told in overlap.of(lambda: model(x), lambda: model(x)):
            assert isinstance(told, torch.Tensor), told
    assert [row["layer"] for row in rows] == [""] * 4


def largest(model, *inputs) -> list[float]:
    """The largest logit of each of two heads, by examining a model of one layer."""
    heads = [head for x in inputs for head in regard.examine(model, [x]).heads]
    return [max(head.statistics["max_logit"].max for head in heads if head.head == at) for at in range(2)]


@pytest.mark.parametrize("large", [0, 1])
def test_hooks_that_another_thread_takes_off_while_a_users_own_is_running(large):
    """torch then calls them without the keyword arguments that they were registered for."""
    model, overlap = nn.Sequential(Parent()).train(), Overlap()
    inputs = [(30.0 if at == large else 1.0) * torch.randn(1, 9, 16) for at in range(2)]
    right = largest(model, *inputs)
    model[0].register_forward_pre_hook(overlap.here)
    regard.qk_clip(model)
    for told in overlap.of(*(lambda x=x: model(x) for x in inputs)):
        assert isinstance(told, torch.Tensor), told
    assert regard.qk_clip(model, threshold=1e9).max_logit["0"] == pytest.approx(right, rel=1e-4)
    regard.qk_clip.stop(model)


class Torchs(nn.Module):
    """torch's multi-head function, which looks its sdpa up by name, with a place between the projections and that."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.inner, self.overlap, linear = nn.MultiheadAttention(16, 2, batch_first=True), Overlap(), F.linear
        monkeypatch.setattr(F, "linear", lambda *args: (linear(*args), self.overlap.here())[0])

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("large", [0, 1])
def test_torchs_multi_head_function_in_two_threads_is_seen_by_qk_clip(large, monkeypatch):
    model = Torchs(monkeypatch).train()
    inputs = [(30.0 if at == large else 1.0) * torch.randn(1, 9, 16) for at in range(2)]
    right = largest(model, *inputs)
    regard.qk_clip(model)
    for told in model.overlap.of(*(lambda x=x: model(x) for x in inputs)):
        assert isinstance(told, torch.Tensor), told
    assert regard.qk_clip(model, threshold=1e9).max_logit["inner"] == pytest.approx(right, rel=1e-4)
    regard.qk_clip.stop(model)
    assert F.scaled_dot_product_attention is interception.SDPA


def test_torchs_multi_head_function_in_two_threads_is_swapped(monkeypatch):
    model, inputs = Torchs(monkeypatch).eval(), [3.0 * torch.randn(2, n, 16) for n in (17, 9)]
    with regard.using(model, normalizer="sparsemax"), torch.no_grad():
        alone = [model(x) for x in inputs]
        for told, right in zip(model.overlap.of(*(lambda x=x: model(x) for x in inputs)), alone, strict=True):
            assert isinstance(told, torch.Tensor) and torch.equal(told, right), told
    assert F.scaled_dot_product_attention is interception.SDPA


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("large", [0, 1])
def test_what_regards_own_layer_remembers_is_its_threads(large, watched):
    """The policy is asked after the layer has put its queries and keys aside, before a watch reads them."""
    overlap = Overlap()
    one = torch.ones(1, 1, 1)
    model = regard.nn.MultiheadAttention(16, 2, temperature=lambda visible_keys, rows: overlap.here() or one).train()
    inputs = [(30.0 if at == large else 1.0) * torch.randn(1, 9, 16) for at in range(2)]
    right = largest(model, *inputs)
    if watched:
        regard.qk_clip(model)
    for told in overlap.of(*(lambda x=x: model(x) for x in inputs)):
        assert isinstance(told, torch.Tensor), told
    assert regard.qk_clip(model, threshold=1e9).max_logit[""] == pytest.approx(right, rel=1e-4)
    regard.qk_clip.stop(model)


def test_qk_clip_of_forwards_that_wait_for_each_other():
    inputs = [scale * torch.randn(2, 9, 16) for scale in (1.0, 30.0)]
    model = Meeting(8).train()
    regard.qk_clip(model)
    for _ in range(3):
        told = at_once(*(lambda x=x: model(x).sum().backward() for x in inputs))
        assert told == [None, None]
        clipped = regard.qk_clip(model, threshold=1e9)
        alone = [head for x in inputs for head in regard.examine(Model(8), [x]).heads]
        largest = [max(head.statistics["max_logit"].max for head in alone if head.head == at) for at in range(2)]
        assert clipped.max_logit[""] == pytest.approx(largest, rel=1e-4)
    regard.qk_clip.stop(model)
    assert not interception.ACTIVE


def test_torchs_fast_path_is_as_it_was():
    assert torch.backends.mha.get_fastpath_enabled()
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 24, 16)
    told = at_once(*(lambda: len(regard.examine(encoder, [x]).heads) for _ in range(2)), lambda: entropies(Model(5), x))
    assert told[:2] == [2, 2] and len(told[2]) == 6
    assert torch.backends.mha.get_fastpath_enabled()
