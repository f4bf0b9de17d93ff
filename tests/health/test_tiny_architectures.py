"""The small models of transformers' architectures that are made from their configuration classes."""

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
from regard.health.models.tiny_architectures import NotBuilt, list_names, make_config, make_model
from regard.health.models.tiny_inputs import find_runnable, make_batch

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


def test_windows_of_images_are_shrunk_with_them():
    model = make_model("swin")
    assert model.config.image_size == 32 and 2 * model.config.window_size == 8  # two windows across the first stage


def test_what_cannot_be_made_is_said():
    assert len(list_names()) > 300
    with pytest.raises(NotBuilt, match="no configuration 'lama'"):
        make_model("lama")


@pytest.mark.parametrize(
    "name",
    [
        "clip",
        "siglip2",
        "blip-2",
        "esm",
        "videomae",
        "parakeet_ctc",
        "audio-spectrogram-transformer",
        "pix2struct",
        "sam2",
        "detr",
        "depth_anything",
    ],
)
def test_ways_to_shrink_and_inputs_are_tried_until_a_forward_runs(name):
    state = torch.get_rng_state()
    model, make = find_runnable(partial(make_config, name))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        first = model(**make(padding=0))[0]
        again, other = model(**make(padding=0))[0], model(**make(padding=0, seed=1))[0]
    assert torch.equal(first, again) and first.shape == other.shape and not torch.equal(first, other)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_voice_with_random_weights_says_a_text_in_little_time():
    model, make = find_runnable(partial(make_config, "vits"), attention=None)
    with torch.no_grad():
        assert model(**make()).waveform.shape[-1] < 10_000  # 256 a token


def test_the_reason_of_what_does_not_run_is_that_of_the_first_way():
    with pytest.raises(NotBuilt, match="no configuration 'lama'"):
        find_runnable(partial(make_config, "lama"))
    with pytest.raises(NotBuilt, match="has no attribute 'image_size'"):  # not that it has no ForMaskedLM
        find_runnable(partial(make_config, "slanext"), ("ForMaskedLM", None))
    with pytest.raises(NotBuilt, match="modeling_sam has no model for SamMaskDecoderConfig"):
        find_runnable(partial(make_config, "sam_mask_decoder"), ("ForMaskedLM", None))
