"""Several threads: examinations take turns, and forwards of other threads do not count."""

from __future__ import annotations

import threading

import torch
from torch import nn

import regard


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


def test_torchs_fast_path_is_as_it_was():
    assert torch.backends.mha.get_fastpath_enabled()
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 24, 16)
    told = at_once(*(lambda: len(regard.examine(encoder, [x]).heads) for _ in range(2)), lambda: entropies(Model(5), x))
    assert told[:2] == [2, 2] and len(told[2]) == 6
    assert torch.backends.mha.get_fastpath_enabled()
