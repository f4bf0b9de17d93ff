"""`import regard.hf`: attn_implementation="regard" against transformers' own eager attention."""

import copy
import importlib
import sys

import pytest
import torch

import regard

transformers = pytest.importorskip("transformers")
from hf_models import all_names, make_batch, make_model, padded, text_rows, tokens  # noqa: E402
from transformers import AutoModelForCausalLM, StaticCache  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

import regard.hf  # noqa: E402

DECODING = ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "qwen3"]


def pair(name, implementation="regard", kind=transformers.AutoModel, **more):
    """Returns (eager model, the same with the implementation)."""
    torch.manual_seed(1)
    own = make_model(name, kind, **more)
    own.set_attn_implementation("eager")
    other = copy.deepcopy(own)
    other.set_attn_implementation(implementation)
    assert other.config._attn_implementation == implementation
    return own, other


def near(a, b, tolerance=1e-5):
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", all_names())
def test_outputs_are_those_of_eager(name, side):
    own, other = pair(name)
    batch = make_batch(name, side)
    with torch.no_grad():
        near(*(text_rows(batch, model(**batch).last_hidden_state) for model in (other, own)))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5", "vit"])
def test_gradients_are_those_of_eager(name):
    own, other = pair(name)
    batch = make_batch(name)
    for model in (own, other):
        rows = text_rows(batch, model.train()(**batch).last_hidden_state) if name in ("llama", "gpt_oss") else (
            text_rows(batch, model(**batch).last_hidden_state)
        )  # fmt: skip
        (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
    gradients = dict(other.named_parameters())
    seen = [key for key, p in own.named_parameters() if p.grad is not None]
    assert any(part in key for key in seen for part in ("q_proj", "query", ".q.")), seen
    for key, p in own.named_parameters():
        if p.grad is not None:
            near(gradients[key].grad, p.grad, 2e-5)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", DECODING)
def test_generation_is_that_of_eager(name, static):
    own, other = pair(name, kind=AutoModelForCausalLM)
    batch = padded(batch=2, length=9, side="left")
    options = dict(
        max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    options |= dict(cache_implementation="static", disable_compile=True) if static else {}
    expected, found = (model.generate(**batch, **options) for model in (own, other))
    assert expected.sequences.equal(found.sequences)
    near(torch.stack(found.logits), torch.stack(expected.logits))


def test_a_prefill_into_a_static_cache():
    own, other = pair("llama", kind=AutoModelForCausalLM)
    ids = tokens(2, 7)
    caches = [StaticCache(config=own.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        expected, found = (m(ids, past_key_values=c).logits for m, c in zip((own, other), caches, strict=True))
    near(found, expected)


def separately(model, ids, lengths):
    return torch.cat([model(part).last_hidden_state for part in ids.split(lengths, 1)], 1)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_documents_packed_by_positions(name, use_cache):
    own, other = pair(name)
    lengths, ids = [3, 8, 1, 5], tokens(1, 17)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        near(other(ids, position_ids=places, use_cache=use_cache).last_hidden_state, separately(own, ids, lengths))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_several_rows_of_packed_documents(name, use_cache):
    own, other = pair(name)
    rows, ids = ([3, 8, 1, 5], [10, 7]), tokens(2, 17)
    places = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    with torch.no_grad():
        expected = torch.cat([separately(own, row[None], lengths) for row, lengths in zip(ids, rows, strict=True)])
        near(other(ids, position_ids=places, use_cache=use_cache).last_hidden_state, expected)
        ones = torch.ones_like(ids)
        near(other(ids, position_ids=places, attention_mask=ones).last_hidden_state, expected)


ENDS = torch.tensor([0, 3, 11, 17])
WRONG_ENDS = {
    "beyond the tokens": (1, dict(cu_seq_lens_q=[0, 3, 18], cu_seq_lens_k=[0, 3, 18]), "17, or before, got 18"),
    "falling": (1, dict(cu_seq_lens_q=ENDS.flip(0), cu_seq_lens_k=ENDS.flip(0)), "begin with 0 and never fall"),
    "one of two": (1, dict(cu_seq_lens_q=ENDS), "both be given"),
    "several rows": (2, dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS), "a batch of 2"),
    "a maximum too small": (1, dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS, max_length_k=3), "8 tokens, more than"),
}


@pytest.mark.parametrize(("batch", "given", "message"), WRONG_ENDS.values(), ids=WRONG_ENDS)
def test_wrong_cu_seq_lens_are_refused(batch, given, message):
    _, other = pair("llama")
    with pytest.raises(ValueError, match=message):
        other(tokens(batch, 17), **given)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents_packed_by_cu_seq_lens(name):
    own, other = pair(name)
    lengths, ids = [3, 8, 1, 5], tokens(1, 17)
    ends = torch.tensor([0, 3, 11, 12, 17], dtype=torch.int32)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=8, max_length_k=8, position_ids=places)
    with torch.no_grad():
        near(other(ids, **packed).last_hidden_state, separately(own, ids, lengths))


def test_packed_documents_make_no_dense_mask(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a mask of queries × keys was made")

    monkeypatch.setattr(regard.Mask, "dense", refuse)
    _, other = pair("llama")
    places = torch.cat([torch.arange(n) for n in (3, 8, 6)])[None]
    with torch.no_grad():
        assert other(tokens(1, 17), position_ids=places).last_hidden_state.isfinite().all()


def test_the_layers_share_the_mask_of_packed_documents(monkeypatch):
    seen = []
    attend = regard.attention
    monkeypatch.setattr(
        regard, "attention", lambda *given, **options: seen.append(given[3]) or attend(*given, **options)
    )
    _, other = pair("llama")
    ids, places = tokens(1, 19), torch.cat([torch.arange(n) for n in (4, 7, 8)])[None]
    with torch.no_grad():
        other(ids, position_ids=places)
        other(ids, cu_seq_lens_q=(ends := torch.tensor([0, 4, 11, 19])), cu_seq_lens_k=ends)
    layers = other.config.num_hidden_layers
    positions, listed = seen[:layers], seen[layers:]
    assert layers > 1 and len({mask.parts[0] for mask in positions}) == len({mask.parts[0] for mask in listed}) == 1
    assert positions[0].parts[0].reach == (7, 7) and listed[0].parts[0].reach == (7, 0)


def test_a_position_tensor_that_changes_is_read_again():
    own, other = pair("llama")
    ids, places = tokens(1, 8), torch.arange(8)[None].clone()
    with torch.no_grad():
        near(other(ids, position_ids=places).last_hidden_state, own(ids).last_hidden_state)
        places[0, 4:] -= 4
        near(other(ids, position_ids=places).last_hidden_state, separately(own, ids, [4, 4]))


@pytest.mark.parametrize("spec", [*regard.normalizers.names(), "entmax(alpha=1.25)", "sigmoid(bias=-3)"])
def test_every_normaliser_has_a_name(spec):
    own, other = pair("llama", f"regard:{spec}")
    batch = make_batch("llama", "left")
    with torch.no_grad():
        with regard.using(own, normalizer=spec):
            expected = own(**batch).last_hidden_state
        near(text_rows(batch, other(**batch).last_hidden_state), text_rows(batch, expected))
    assert "regard:" + spec in AttentionMaskInterface._global_mapping


def test_a_sink_is_left_out_where_the_normaliser_has_no_exponential_denominator():
    own, other = pair("gpt_oss", "regard:sparsemax")
    batch = make_batch("gpt_oss")
    with torch.no_grad(), regard.using(own, normalizer="sparsemax"):
        expected = text_rows(batch, own(**batch).last_hidden_state)
    with torch.no_grad():
        near(text_rows(batch, other(**batch).last_hidden_state), expected)


def test_dropout_is_the_models_own():
    _, other = pair("llama", attention_dropout=0.5)
    ids = tokens(1, 9)
    with torch.no_grad():
        still = other(ids).last_hidden_state
        other.train()
        torch.manual_seed(3)
        one = other(ids).last_hidden_state
        torch.manual_seed(3)
        again = other(ids).last_hidden_state
    assert one.equal(again) and not one.equal(still)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5", "bert"])
def test_examine_reads_the_same_as_on_eager(name):
    own, other = pair(name)
    batch = make_batch(name)
    expected, found = regard.examine(own, [batch]), regard.examine(other, [batch])
    assert found.unmeasured == [] and len(found.heads) == len(expected.heads)
    for head, same in zip(found.heads, expected.heads, strict=True):
        assert (head.layer, head.head) == (same.layer, same.head)
        for statistic, spread in same.statistics.items():
            assert head.statistics[statistic].mean == pytest.approx(spread.mean, rel=1e-4, abs=1e-5), statistic
            assert head.statistics[statistic].count == spread.count, statistic


def test_examine_reads_the_normaliser_that_ran():
    own, other = pair("llama", "regard:entmax15")
    batch = make_batch("llama")
    found = regard.examine(other, [batch])
    expected = regard.examine(own, [batch], what_if=["normalizer=entmax15"]).what_if["normalizer=entmax15"]
    assert found.unmeasured == []
    first = [head for head in expected.heads if head.index == 0]  # later layers get other inputs
    for head, same in zip(found.heads, first, strict=False):
        assert head.statistics["support"].mean == pytest.approx(same.statistics["support"].mean, rel=1e-5)


def test_a_compiled_model():
    own, other = pair("llama")
    ids = tokens(2, 9)
    compiled = torch.compile(other, backend="aot_eager")
    with torch.no_grad():
        near(compiled(ids).last_hidden_state, own(ids).last_hidden_state)


def test_an_unknown_name_is_refused():
    model = make_model("llama")
    with pytest.raises(ValueError, match="entmax15"):
        model.set_attn_implementation("regard:entmax51")


def test_a_model_that_computes_attention_by_hand_is_refused():
    config = transformers.AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=60)
    with pytest.raises(ValueError, match="own code"):
        transformers.AutoModel.from_config(config, attn_implementation="regard")


def test_what_would_be_left_out_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="four dims"):
        regard.hf.attention_forward(torch.nn.Identity(), q, q, q, torch.ones(1, 4))
    with pytest.raises(ValueError, match="head_mask"):
        regard.hf.attention_forward(torch.nn.Identity(), q, q, q, None, head_mask=torch.ones(2))


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    monkeypatch.delitem(sys.modules, "regard.hf")
    with pytest.raises(ImportError, match=r"regard\[hf\]"):
        importlib.import_module("regard.hf")


def test_readings_by_key_of_every_layer():
    own, other = pair("llama")
    ids = tokens(2, 7)
    with torch.no_grad(), regard.hf.reading("received", "top_keys(2)", return_weights=[6]) as stats:
        found = other(ids).last_hidden_state
    expected = own(ids, output_attentions=True)
    near(found, expected.last_hidden_state)
    assert len(stats) == own.config.num_hidden_layers == len(expected.attentions)
    for mine, p in zip(stats, expected.attentions, strict=True):
        near(mine.received, p.sum(2))
        near(mine.top_keys.weight, p.topk(2).values)
        near(mine.weights, p[:, :, [6]])
    other(ids)
    assert len(stats) == len(expected.attentions)
