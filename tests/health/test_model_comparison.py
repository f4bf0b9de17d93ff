"""`compare(model, reference, batches)`: the first layer that differs, in what, and what it means."""

import copy

import pytest
import torch

import regard
from regard.health.models.tiny import TinyLM


@pytest.fixture
def models():
    torch.manual_seed(0)
    reference = TinyLM(layers=3, heads=4, width=32, length=32).eval()
    return copy.deepcopy(reference), reference, [torch.randint(0, 90, (2, 20))]


def test_equal_models_compute_the_same(models):
    found = regard.compare(*models)
    assert found.first is None and found.output == 0.0 and "the same" in found.meaning
    assert len(found.layers) == 3


def test_a_scale_that_differs_in_one_layer(models):
    model, reference, batches = models
    model.blocks[1].attention.scale *= 2.0
    found = regard.compare(model, reference, batches)
    assert found.first.index == 1 and found.first.layer == "blocks.1.attention"
    assert found.parts == ["scores", "output"] and "scales differ" in found.meaning
    assert "First difference: layer 1 (blocks.1.attention)" in str(found)
    assert found.to_json()["first"] == 1


def test_heads_in_another_order(models):
    model, reference, batches = models
    weight = model.blocks[2].attention.qkv.weight.data
    weight[32:64] = weight[32:64].roll(8, 0)
    found = regard.compare(model, reference, batches)
    assert found.first.index == 2 and found.parts[0] == "k" and "order [3, 0, 1, 2]" in found.meaning


def test_q_and_k_exchanged(models):
    model, reference, batches = models
    weight = model.blocks[0].attention.qkv.weight.data
    weight[:64] = weight[:64].roll(32, 0)
    found = regard.compare(model, reference, batches)
    assert found.first.index == 0 and "q and k are exchanged" in found.meaning


def test_what_lies_between_two_attentions_and_behind_the_last(models):
    model, reference, batches = models
    model.blocks[0].mlp[0].weight.data *= 1.5
    found = regard.compare(model, reference, batches)
    assert found.first.index == 1 and "MLP" in found.meaning
    other = copy.deepcopy(reference)
    other.head.weight.data *= 2.0
    found = regard.compare(other, reference, batches)
    assert found.first is None and "after the last attention" in found.meaning


def test_what_it_needs(models):
    model, reference, batches = models
    with pytest.raises(ValueError, match="batches"):
        regard.compare(model, reference)
    with pytest.raises(TypeError, match="b must be a torch"):
        regard.compare(model, "report.json", batches)
