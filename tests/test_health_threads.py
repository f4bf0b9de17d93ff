"""Models examined, watched and trained in several threads at once."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

import regard
from regard.health import intercept


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
    assert monitor.samples == monitor.step == 6 and not monitor.unmeasured and not intercept.ACTIVE
    report = [regard.examine(Model(7).eval(), [x]) for x in inputs]
    alone = {round(head.statistics["logit_variance"].mean, 9) for one in report for head in one.heads}
    assert {round(row["logit_variance"], 9) for row in rows} == alone


class Child(nn.Module):
    """A projection in which each thread does its task."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.tasks = nn.Linear(16, 48), {}

    def forward(self, x):
        self.tasks[threading.get_ident()]()
        return self.projection(x)


class Parent(nn.Module):
    """An attention of its own, after a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def forward(self, x):
        q, k, v = self.child(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def test_a_call_belongs_to_its_module_though_another_thread_stops_watching_meanwhile():
    model, x, rows = Parent().train(), torch.randn(1, 9, 16), []
    within, entered, ended = (threading.Event() for _ in range(3))

    def run(before, task, after):
        assert before()
        model.child.tasks[threading.get_ident()] = task
        model(x)
        after()

    def first():
        run(lambda: True, lambda: (within.set(), entered.wait(10.0)), ended.set)

    def second():
        run(lambda: within.wait(10.0), lambda: (entered.set(), ended.wait(10.0)), lambda: None)

    with regard.Monitor(model, every=1, log=rows.append, budget=1.0) as monitor:
        monitor.budget = math.inf
        assert at_once(first, second) == [None, None]
    assert entered.is_set() and ended.is_set()
    assert [row["layer"] for row in rows] == [""] * 4


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
    assert not intercept.ACTIVE


def test_torchs_fast_path_is_as_it_was():
    assert torch.backends.mha.get_fastpath_enabled()
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 24, 16)
    told = at_once(*(lambda: len(regard.examine(encoder, [x]).heads) for _ in range(2)), lambda: entropies(Model(5), x))
    assert told[:2] == [2, 2] and len(told[2]) == 6
    assert torch.backends.mha.get_fastpath_enabled()
