"""transformers' flash_attention_2, kernels of the hub and flex_attention: readings as on the eager model."""

import copy

import fused_stand_ins as packages
import pytest
import torch

import regard

transformers = pytest.importorskip("transformers")
import transformers.modeling_flash_attention_utils as flash  # noqa: E402
from hf_models import make_batch, make_model, tokens  # noqa: E402
from transformers.integrations.flash_attention import flash_attention_forward  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

NAMES = ["llama", "mistral", "gemma2", "qwen3", "bert"]


@pytest.fixture
def stand_in(monkeypatch):
    """transformers finds the stand-in in the place of flash-attention; a kernel of the hub is registered like it."""
    functions = packages.flash_attn_func, packages.flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input
    process = flash._lazy_define_process_function(packages.flash_attn_varlen_func)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: (functions, (process, dict)))
    monkeypatch.setitem(AttentionInterface._global_mapping, "someone/kernel", flash_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "someone/kernel", flash_attention_mask)


def pair(name, implementation):
    torch.manual_seed(2)
    own = make_model(name)
    own.set_attn_implementation("eager")
    other = copy.deepcopy(own)
    other.config._attn_implementation_internal = implementation
    return own, other


def compare(expected, found):
    assert found.unmeasured == [] and len(found.heads) == len(expected.heads) > 0
    for head, same in zip(found.heads, expected.heads, strict=True):
        assert (head.layer, head.head) == (same.layer, same.head)
        for name, spread in same.statistics.items():
            assert head.statistics[name].count == spread.count, name
            assert head.statistics[name].mean == pytest.approx(spread.mean, rel=1e-4, abs=2e-5), name


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_padding(name, side, stand_in):
    own, other = pair(name, "flash_attention_2")
    batch = make_batch(name, side)
    compare(regard.examine(own, [batch]), regard.examine(other, [batch]))


def test_a_kernel_of_the_hub(stand_in):
    own, other = pair("llama", "someone/kernel")
    batch = make_batch("llama")
    compare(regard.examine(own, [batch]), regard.examine(other, [batch]))


@pytest.mark.parametrize("by", ["positions", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_documents(name, by, stand_in):
    own, other = pair(name, "flash_attention_2")
    lengths, ids = [3, 8, 1, 5], tokens(1, 17)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = dict(input_ids=ids, position_ids=places, use_cache=False)
    ends = torch.tensor([0, 3, 11, 12, 17], dtype=torch.int32)
    more = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=8, max_length_k=8) if by == "cu_seq_lens" else {}
    expected, found = regard.examine(own, [batch]), regard.examine(other, [dict(batch, **more)])
    compare(expected, found)


def test_generation_with_a_cache(stand_in):
    torch.manual_seed(2)
    own = make_model("llama", transformers.AutoModelForCausalLM)
    own.set_attn_implementation("eager")
    other = copy.deepcopy(own)
    other.config._attn_implementation_internal = "flash_attention_2"
    ids = tokens(2, 6)

    def generate(model):
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    compare(regard.examine(own, [generate]), regard.examine(other, [generate]))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_swap(name, stand_in):
    own, other = pair(name, "flash_attention_2")
    ids = tokens(2, 9)
    with torch.no_grad(), regard.using(own, normalizer="sparsemax"), regard.using(other, normalizer="sparsemax"):
        a, b = (model(ids).last_hidden_state for model in (other, own))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flex_attention(name):
    own, other = pair(name, "flex_attention")
    batch = make_batch(name)
    compare(regard.examine(own, [batch]), regard.examine(other, [batch]))
