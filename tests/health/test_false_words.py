"""Words that were said and were false: the model or text of each, and what is said now."""

import pytest
import torch
from contract_data import codes, run_check
from torch import nn

import regard
from regard.health import examine
from regard.health.progress import Budget
from regard.health.tokens.text import as_batch

transformers = pytest.importorskip("transformers")

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def ids(*shape, low=4, high=60):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


def two_towers(name, side=16):
    text = dict(SMALL, vocab_size=60, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    vision = dict(SMALL, image_size=side, patch_size=side // 4)
    config = transformers.AutoConfig.for_model(name, text_config=text, vision_config=vision, projection_dim=16)
    return transformers.AutoModel.from_config(config)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_logits_that_compare_all_texts_with_all_images_mix_no_sequences(name):
    batch = dict(input_ids=ids(3, 12), pixel_values=torch.randn(3, 3, 16, 16))
    assert codes(run_check("sequences", two_towers(name), batch)) == []


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_logits_that_compare_all_texts_with_all_images_are_those_of_a_row_alone(name):
    batch = dict(input_ids=ids(3, 20), pixel_values=torch.randn(3, 3, 16, 16))
    model = two_towers(name)
    assert codes(run_check("sequences", model, batch)) == codes(run_check("padding", model, batch)) == []
    tower = model.text_model
    tower.register_forward_hook(lambda module, given, output: mixed(output))
    assert "RG212" in codes(run_check("sequences", model, batch))


def test_a_tower_of_images_with_as_many_patches_as_the_text_has_tokens_sees_no_padding():
    """SigLIP pools the last token, padding or not; its images have no padding to see, and no loss is asked of it."""
    torch.manual_seed(0)
    model, batch = two_towers("siglip", 32), dict(input_ids=ids(3, 16), pixel_values=torch.randn(3, 3, 32, 32))
    verdict = regard.check(model, [batch], select="RG202,RG8")
    assert bool(verdict) and [(one.code, one.layer) for one in verdict.notes] == [("RG202", None)]
    assert "the pooling takes padding" in verdict.notes[0].evidence
    assert not any("regard failed" in one.reason for one in verdict.skipped)


def mixed(output):
    """An output from which the mean of its batch is taken."""
    output.pooler_output = output.pooler_output - 0.5 * output.pooler_output.mean(0)
    return output


def tiny(name):
    from regard.health.models.targets import load_target

    torch.manual_seed(0)
    subject = load_target(f"hf-tiny:{name}")
    return subject.model, subject.batches[0]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("deepseek_v32", "decoding"),
        ("xlnet", "gradients"),
        ("maskformer", "gradients"),  # its first queries are 0
        ("albert", "inputs_ignored"),
        ("encodec", "inputs_ignored"),
        ("cpmant", "leak"),
        ("pop2piano", "tied_weights"),
        ("phimoe", "training_differs"),
        ("step3p5", "settings_of_config"),  # a limit of infinity, which is what its configuration says
        ("t5gemma", "tied_weights"),  # its head is the decoder's embedding
        ("metaclip_2", "gradients"),  # no end token in the text, so that it pools the first, which sees itself
        ("xclip", "sequences"),  # vectors of all pairs of a video and a text
        ("cwm", "packing"),  # several end tokens
        ("blip-2", "sequences"),  # as many places for its image as it has vectors
    ],
)
def test_tiny_models_that_are_sound(name, check):
    assert codes(run_check(check, *tiny(name))) == []


def test_a_head_that_left_the_decoders_embedding_is_found():
    model, batch = tiny("t5gemma")
    model.lm_head.out_proj.weight = nn.Parameter(2.0 * model.lm_head.out_proj.weight.detach())
    assert codes(run_check("tied_weights", model, batch)) == ["RG612"]


def test_shares_of_a_batch_are_not_those_of_a_row_alone():
    model, batch = tiny("videoprism")
    verdict = regard.check(model, [batch], select="RG201,RG212,RG213")
    reasons = {one.code: one.reason for one in verdict.skipped}
    assert verdict.passed == ["RG201"] and not verdict.failures  # RG213 passed where nothing had asked it
    assert all("share of each sequence" in reasons[code] for code in ("RG212", "RG213"))


def test_other_tokens_leave_the_places_of_an_image():
    model, given = tiny("blip-2")
    batch, place = as_batch(given, torch.device("cpu"), model), model.config.image_token_index
    where = torch.ones_like(batch.ids, dtype=torch.bool)
    changed = batch.exchange(batch.ids, where)
    assert torch.equal(changed == place, batch.ids == place) and bool((batch.ids == place).any())
    assert bool((changed != batch.ids)[batch.ids != place].float().mean() > 0.8)


@pytest.mark.parametrize("forwards", [3, 9, 15])
def test_a_check_that_time_cut_off_has_not_passed(forwards, monkeypatch):
    """Forwards are refused, not finished, once the time is over: one check of a slow model took minutes."""
    count = 0

    def forward(module, given):
        nonlocal count
        count += 1

    torch.manual_seed(0)
    model, batch = two_towers("clip").text_model, dict(input_ids=ids(3, 20))
    whole = regard.check(model, [batch], select="RG1,RG2").passed
    monkeypatch.setattr(Budget, "is_spent", property(lambda self: count >= forwards))
    model.register_forward_pre_hook(forward)
    verdict = regard.check(model, [batch], select="RG1,RG2")
    late = {one.code for one in verdict.skipped if "out of time" in one.reason}
    assert count <= forwards + 3 and set(verdict.passed) < set(whole) and late >= set(whole) - set(verdict.passed)


def test_a_leak_that_only_a_cache_brings_is_said_to_be_one():
    (found,) = run_check("leak", *tiny("fsmt"))
    assert found.code == "RG101" and "only with use_cache=True" in found.evidence


def test_parameters_that_a_last_layer_of_a_library_does_not_read_are_a_note():
    (found,) = run_check("gradients", *tiny("lilt"))
    assert (found.code, found.severity) == ("RG620", "note")


def test_indexer_keys_that_the_cache_does_not_keep_are_found(monkeypatch):
    from transformers import DynamicCache

    model, batch = tiny("deepseek_v32")
    own = DynamicCache.update_indexer

    def turned(self, k, layer):
        every = own(self, k, layer)
        return every if every.shape[1] == k.shape[1] else every.flip(1)

    monkeypatch.setattr(DynamicCache, "update_indexer", turned)
    assert codes(run_check("decoding", model, batch)) == ["RG206"]


def test_parameters_that_no_segment_ids_reach_are_found():
    model, batch = tiny("xlnet")
    attention = model.transformer.layer[0].rel_attn
    attention.rel_attn_core = without_segments(attention.rel_attn_core)
    assert codes(run_check("gradients", model, batch)) == ["RG620"]


def without_segments(core):
    return lambda *given, seg_mat=None, **named: core(*given, **named)


class OverBatch(nn.Module):
    """Attention over the batch axis, causal or not."""

    def __init__(self, causal):
        super().__init__()
        self.embedding, self.attention, self.causal = nn.Embedding(60, 32), nn.MultiheadAttention(32, 4), causal

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) if self.causal else None
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_the_batch_is_named_whichever_way_it_looks(causal):
    assert "RG201" in codes(run_check("sequences", OverBatch(causal), ids(3, 12)))


def test_equal_nan_are_equal():
    config = transformers.AutoConfig.for_model("llama", **SMALL, vocab_size=60)
    model = transformers.AutoModelForCausalLM.from_config(config)
    nn.init.constant_(model.model.layers[1].self_attn.v_proj.weight, float("nan"))
    assert codes(run_check("evaluation_noise", model, ids(2, 12))) == []


@pytest.mark.parametrize("name", ["gemma4_text", "t5", "granite", "dia", "gpt_neo"])
def test_a_scale_that_the_class_means_is_not_too_large(name):
    from regard.health.models.tiny_architectures import make_model
    from regard.health.models.tiny_inputs import make_batch

    model = make_model(name)
    report = examine(model, [make_batch(model, length=24, padding=0)], checks=False)
    assert "RG401" not in {one.code for one in report.findings if one.severity != "note"}


def test_landmarks_are_no_rank_collapse():
    config = transformers.AutoConfig.for_model(
        "nystromformer", **SMALL, vocab_size=60, num_landmarks=4, segment_means_seq_len=32, max_position_embeddings=64
    )
    model = transformers.AutoModel.from_config(config)
    assert "RG311" not in codes(run_check("rank_collapse", model, ids(2, 32)))


@pytest.mark.parametrize(("is_normed", "wanted"), [(True, set()), (False, {"RG401"})])
def test_a_large_scale_of_queries_normed_by_hand_is_meant(is_normed, wanted):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96, bias=False)
            nn.init.normal_(self.qkv.weight, 0.0, 32**-0.5)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            if is_normed:
                q, k = (nn.functional.normalize(one, dim=-1) for one in (q, k))
            return nn.functional.scaled_dot_product_attention(q, k, v, scale=10.0)

    report = examine(Attention(), [torch.randn(2, 40, 32)], checks=False)
    assert {one.code for one in report.findings if one.severity == "warning"} & {"RG401"} == wanted


def test_arguments_of_one_number_for_each_row_are_taken_with_it():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.TransformerEncoderLayer(32, 4, batch_first=True)

        def forward(self, x, timestep):
            return self.attention(x * timestep.view(-1, 1, 1))

    batch = dict(x=torch.randn(2, 12, 32), timestep=torch.tensor([0.3, 2.0]))
    assert codes(run_check("sequences", Denoiser(), batch)) == []
