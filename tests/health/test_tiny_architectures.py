"""The small models of transformers' architectures that are made from their configuration classes."""

import pytest
import torch

pytest.importorskip("transformers")
from regard.health.models.tiny_architectures import NotBuilt, list_names, make_model
from regard.health.models.tiny_inputs import make_batch

NAMES = [
    "llama",
    "qwen2_5_vl_text",
    "gemma4_text",
    "deepseek_v32",
    "qwen3_next",
    "bamba",
    "bert",
    "vit",
    "t5",
    "whisper",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_runs_on_its_batch(name):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = make_model(name)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    with torch.no_grad():
        first, second = (model(**make_batch(model))[0] for _ in range(2))
    assert first.isfinite().all() and torch.equal(first, second) and first.std() > 0.05


def test_hybrids_keep_a_layer_of_each_kind():
    kinds = make_model("qwen3_next").config.layer_types
    assert {"full_attention", "linear_attention"} <= set(kinds)


def test_what_cannot_be_made_is_said():
    assert len(list_names()) > 300
    with pytest.raises(NotBuilt, match="no configuration 'lama'"):
        make_model("lama")
