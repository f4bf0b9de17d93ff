"""Statistics of weights that somebody already has."""

import math

import pytest
import torch
from rows_data import rows

from regard import normalizers, statistics
from regard.statistics import of_scores, of_weights


@pytest.mark.parametrize("name", normalizers.names())
def test_of_weights_agrees_with_of_scores(name):
    choice = normalizers.get(name)
    s = rows(12)[[0, 1, 2, 3, 7, 8]]
    p = choice.reference(s, None, choice.theta)
    want = of_scores(s, None, name)
    for given_scores in (s, None):
        got = of_weights(p, given_scores, name, visible=torch.ones_like(s, dtype=torch.bool))
        for key in got:
            assert torch.allclose(got[key], want[key], rtol=1e-6, atol=1e-9), key
    assert set(of_weights(p, s, name)) == set(statistics.NAMES)


def test_the_notes_functions():
    w = torch.softmax(torch.randn(5, 5, dtype=torch.float64), -1)
    stats = of_weights(w)
    note_entropy = -(w * torch.log(w + 1e-12)).sum(-1)
    i = torch.arange(5.0, dtype=torch.float64)
    assert torch.allclose(stats.entropy, note_entropy, atol=1e-9)
    assert torch.allclose(stats.distance, (w * (i[:, None] - i).abs()).sum(-1))


def test_of_weights_can_be_differentiated_through_zeros_and_counts_in_float32():
    w = torch.tensor([[1.0, 0.0], [0.3, 0.7]], requires_grad=True)
    of_weights(w).entropy.sum().backward()
    assert w.grad.isfinite().all()
    far = torch.zeros(1, 600, dtype=torch.bfloat16)
    far[0, 599] = 1.0
    assert of_weights(far).distance.item() == 599.0


def test_of_weights_with_a_nan_says_nan():
    stats = statistics.of_weights(torch.tensor([[math.nan, 0.5, 0.5], [0.2, 0.3, 0.5]]))
    for name, x in stats.items():
        assert x[1].isfinite(), name
        assert x[0] == 3 if name == "visible_keys" else x[0].isnan(), name


def test_of_weights_alone_every_positive_weight_is_a_visible_key():
    stats = of_weights(torch.tensor([[0.0, 0.25, 0.0, 0.75]]))
    assert stats["visible_keys"].item() == 2 and stats["first_key_mass"].item() == 0.25
    shown = of_weights(torch.tensor([[0.0, 0.25, 0.0, 0.75]]), visible=torch.ones(1, 4, dtype=torch.bool))
    assert shown["visible_keys"].item() == 4 and shown["first_key_mass"].item() == 0.0


def test_of_weights_beside_their_scores_minus_infinity_is_hidden():
    scores = torch.tensor([[-math.inf, 1.0, 0.0, -math.inf]])
    for visible in (None, torch.ones(1, 4, dtype=torch.bool)):
        stats = of_weights(torch.softmax(scores, -1), scores, visible=visible)
        assert stats["visible_keys"].item() == 2 and stats["support"].item() == 2
        assert stats["first_key_mass"].item() == pytest.approx(math.e / (1 + math.e))


@pytest.mark.parametrize("name", normalizers.names())
def test_of_weights_that_are_all_zero_nothing_is_nan(name):
    stats = of_weights(torch.zeros(2, 3), normalizer=name, visible=torch.ones(2, 3, dtype=torch.bool))
    for key, x in stats.items():
        counts = key == "visible_keys" or (key == "support" and not normalizers.get(name).sparse)
        assert (x == (3.0 if counts else 0.0)).all(), key
