"""attn_implementation="regard" is right or refused: unknown keywords, sparse attention, the self-check, unregister."""

import importlib
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")
from hf_models import make_batch, make_model, tokens  # noqa: E402
from transformers.modeling_utils import AttentionInterface, PreTrainedModel  # noqa: E402

import regard.hf  # noqa: E402
from regard.health.models import tiny_architectures  # noqa: E402
from regard.health.models.tiny_inputs import find_runnable  # noqa: E402
from regard.hf import attention, self_check  # noqa: E402

SPARSE = ["deepseek_v32", "glm_moe_dsa", "deepseek_v4", "minimax_m3_vl_text"]


@pytest.fixture(autouse=True)
def _fresh_answers(monkeypatch):
    monkeypatch.delenv("REGARD_HF_CHECK", raising=False)
    monkeypatch.setattr(self_check, "_known", {})


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_is_that_of_eager(name):
    model, make = find_runnable(partial(tiny_architectures.make_config, name))
    assert self_check.compare(model, make, "regard", 1e-5) == ""


def test_a_difference_is_refused_when_the_model_is_made(monkeypatch):
    monkeypatch.setattr(attention, "_keep_indices", lambda module, mask, *_: mask)
    model = tiny_architectures.make_model("deepseek_v32")
    with pytest.raises(ValueError, match="not right for DeepseekV32Model: padded, its output differs"):
        model.set_attn_implementation("regard")
    assert model.config._attn_implementation == "eager"


def test_block_biases_need_an_additive_mask(monkeypatch):
    monkeypatch.setattr(regard.hf, "NEEDS_FLOAT_MASK", set())
    with pytest.raises(ValueError, match="DeepseekV4Model"):
        tiny_architectures.make_model("deepseek_v4").set_attn_implementation("regard")


def test_the_check_runs_once_for_an_architecture(monkeypatch):
    runs, compare = [], self_check._compare_twins
    monkeypatch.setattr(self_check, "_compare_twins", lambda *given: runs.append(given) or compare(*given))
    for _ in range(2):
        make_model("llama").set_attn_implementation("regard")
    make_model("llama").set_attn_implementation("regard:sparsemax")
    assert len(runs) == 1 and list(self_check._known.values()) == ["equal"]
    monkeypatch.setenv("REGARD_HF_CHECK", "0")
    make_model("mistral").set_attn_implementation("regard")
    assert len(runs) == 1


def test_the_check_leaves_the_caller_as_it_was():
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        self_check.check_architecture(transformers.LlamaModel, transformers.LlamaConfig())
    assert list(self_check._known.values()) == ["equal"] and torch.equal(torch.get_rng_state(), before)


def test_an_architecture_that_cannot_be_made_small_is_not_refused(monkeypatch):
    def fail(*_):
        raise tiny_architectures.NotBuilt("no")

    monkeypatch.setattr(self_check, "make_twin", fail)
    make_model("llama").set_attn_implementation("regard")
    assert list(self_check._known.values()) == ["unchecked: no"]


def test_unknown_keywords_and_masks_are_refused_by_name():
    q = torch.randn(1, 2, 4, 8)

    def attend(mask=None, **given):
        return regard.hf.attention_forward(torch.nn.Identity(), q, q, q, mask, **given)

    for name, value in (("relative_bias", torch.ones(2)), ("segments", 3), ("block_indices", torch.zeros(1, 4, 1))):
        with pytest.raises(ValueError, match=f"does not know .*{name}="):
            attend(**{name: value})
    with pytest.raises(ValueError, match="int64"):
        attend(torch.ones(1, 1, 4, 4, dtype=torch.long))
    attend(segments=None, use_cache=True, num_items_in_batch=torch.tensor(3))


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_oss", "t5"])
def test_output_attentions_gives_the_weights(name):
    own, batch = make_model(name), make_batch(name)
    own.set_attn_implementation("eager")
    with torch.no_grad():
        expected = own(**batch, output_attentions=True)
        own.set_attn_implementation("regard")
        found = own(**batch, output_attentions=True)
    lists = [key for key in expected if key.endswith("attentions")]
    assert any(expected[key] for key in lists)
    for key in lists:
        assert len(found[key]) == len(expected[key])
        for a, b in zip(found[key], expected[key], strict=True):
            seen = b.sum(-1) > 0 if "decoder_input_ids" in batch else batch["attention_mask"].bool()[:, None]
            assert (a - b)[seen.expand(a.shape[:3])].abs().max() < 1e-5


def test_unregister_takes_everything_back():
    plain = getattr(PreTrainedModel.get_correct_attn_implementation, "regard_original")  # noqa: B009
    try:
        for _ in range(2):
            importlib.reload(regard.hf)
        assert PreTrainedModel.get_correct_attn_implementation.regard_original is plain
        regard.hf.unregister()
        assert PreTrainedModel.get_correct_attn_implementation is plain
        assert not [name for name in AttentionInterface._global_mapping if name.startswith("regard")]
        with pytest.raises(ValueError, match="not supported"):
            make_model("llama").set_attn_implementation("regard")
    finally:
        importlib.reload(regard.hf)
    make_model("llama").set_attn_implementation("regard")


def test_positions_are_read_once_for_all_layers_in_inference_mode(monkeypatch):
    reads, read = [], attention._read_documents
    monkeypatch.setattr(attention, "_read_documents", lambda positions: reads.append(1) or read(positions))
    model = make_model("llama")
    model.set_attn_implementation("regard")
    with torch.inference_mode():
        places = torch.cat([torch.arange(n) for n in (4, 5)])[None]
        model(tokens(1, 9), position_ids=places)
        assert len(reads) == 1 < model.config.num_hidden_layers
        model(tokens(1, 9), position_ids=places)
    assert len(reads) == 2
