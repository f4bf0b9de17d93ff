"""How sharp a trained model attends: means over the rows that count, written out row by row."""

import math

import pytest
import torch
from regard_lab.training.trials import sharpness

import regard


def test_readings_are_means_over_the_rows_that_count():
    """Causal rows of 1, 2, 3 … keys: the first has no choice and is left out; so is padding."""
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        q, k, v = torch.randn(3, 2, 3, 7, 4)
        layers.append(regard.attention(q, k, v, is_causal=True, normalizer="sparsemax", return_stats=True)[1])
    real = torch.arange(7) < torch.tensor([4, 7])[:, None]
    for rows in (None, [real, real]):
        kept = [(b, i) for b in range(2) for i in range(1, 7) if rows is None or real[b, i]]
        told = sharpness.readings(layers, rows)
        for name, one in {
            "entropy": lambda stats, at: stats.entropy[at],
            "gradient_gain": lambda stats, at: stats.gradient_gain[at],
            "entropy_ratio": lambda stats, at: stats.entropy[at] / math.log(at[2] + 1),
            "support_share": lambda stats, at: stats.support[at] / (at[2] + 1),
        }.items():
            means = [one(stats, (b, h, i)) for stats in layers for h in range(3) for b, i in kept]
            assert told[name] == pytest.approx(float(torch.stack(means).mean()), rel=1e-5), name
        assert told["max_logit"] == max(float(stats.max_logit.max()) for stats in layers)
    table = sharpness.head_table(layers)
    heads = sharpness.by_head(layers[1])
    assert [len(heads) for heads in table] == [3, 3]
    assert table[1][2] == {name: pytest.approx(float(heads[name][2])) for name in sharpness.BY_HEAD}
