"""The configuration against the call: small transformers models that break it, and sound twins."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from contract_data import codes, run_check
from torch import nn

pytest.importorskip("transformers")
from hf_models import make_batch, make_model, tokens

YARN = dict(
    rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16,
    ),
    max_position_embeddings=128,
)  # fmt: skip


def attentions(model):
    return [module for name, module in model.named_modules() if type(module).__name__.endswith("Attention")]


def set_all(name, value):
    def change(model):
        for module in attentions(model):
            setattr(module, name, value)

    return change


def change_base(model):
    rotary = model.rotary_emb
    rotary.inv_freq = 500.0 ** -(torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq))


def halve_angles(model):
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq / 2


def drop_yarn(model):
    width = 2 * len(model.rotary_emb.inv_freq)
    model.rotary_emb.inv_freq = 10000.0 ** -(torch.arange(0, width, 2) / width)


def double_yarn(model):
    model.rotary_emb.attention_scaling = model.rotary_emb.attention_scaling**2


def drop_sinks(model):
    """A kernel without sinks, which the library refuses to choose."""
    model.config._attn_implementation = "sdpa"


class GroupedModel(nn.Module):
    """Grouped queries written by hand, with a configuration: repeat_interleave, or repeat for it."""

    def __init__(self, repeats):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, vocab_size=60)
        self.embedding, self.repeats = nn.Embedding(60, 32), repeats
        self.q, self.kv, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 60)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)
        k, v = (x.repeat(1, 2, 1, 1) if self.repeats else x.repeat_interleave(2, 1) for x in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(o.transpose(1, 2).flatten(2))


def widen_window(model):
    """Masks are made for a window of 6, where the layers' configuration says 5."""
    for module in attentions(model):
        module.config = copy.copy(model.config)
    model.config.sliding_window = 6


def lose_window(model):
    for module in attentions(model):
        module.config = copy.copy(model.config)
    model.config.sliding_window = 60


CASES = [
    ("rotary_of_config", "llama", {}, change_base, "RG416"),
    ("rotary_of_config", "modernbert", {}, lambda model: set_rotary(model, 0.5), "RG416"),
    ("rotary_of_config", "gpt_neox", {}, halve_angles, "RG416"),
    ("rotary_of_config", "llama", YARN, drop_yarn, "RG416"),
    ("call_of_config", "llama", YARN, double_yarn, "RG411"),
    ("scale_of_config", "gemma2", {"query_pre_attn_scalar": 24}, set_all("scaling", 8**-0.5), "RG410"),
    ("scale_of_config", "granite", {}, set_all("scaling", 8**-0.5), "RG410"),
    ("call_of_config", "gemma2", {}, set_all("attn_logit_softcapping", None), "RG412"),
    ("window_of_config", "mistral", {}, widen_window, "RG413"),
    ("window_of_config", "gemma2", {}, lose_window, "RG413"),
    ("call_of_config", "gpt_oss", {}, drop_sinks, "RG414"),
]  # fmt: skip


def set_rotary(model, factor):
    for name, buffer in model.rotary_emb.named_buffers():
        if "inv_freq" in name:
            buffer.mul_(factor)


@pytest.mark.parametrize(("check", "name", "more", "breaks", "code"), CASES)
def test_a_changed_model_is_found_and_its_twin_is_not(check, name, more, breaks, code):
    torch.manual_seed(0)
    kind = {"attn_implementation": "eager"} if name == "gemma2" else {}
    model, batch = make_model(name, **more, **kind), make_batch(name)
    assert codes(run_check(check, model, batch)) == []
    breaks(model)
    assert codes(run_check(check, model, batch)) == [code]


@pytest.mark.parametrize("repeats", [False, True])
def test_key_value_heads_serve_their_own_queries(repeats):
    torch.manual_seed(0)
    assert codes(run_check("call_of_config", GroupedModel(repeats), tokens(2, 12))) == ["RG415"] * repeats


def attend(mistake, module, query, key, value, mask, **given):
    """Eager attention of transformers with one mistake."""
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat(1, groups, 1, 1) if mistake == "repeat" else x.repeat_interleave(groups, 1) for x in (key, value))
    s = given["scaling"] * query @ k.transpose(-1, -2) * (2.0 if mistake == "twice the scale" else 1.0)
    if given.get("softcap") and mistake != "no soft cap":
        s = given["softcap"] * torch.tanh(s / given["softcap"])
    if mask is not None and mistake != "no mask":
        mask = torch.where(F.pad(mask[..., 1:], (0, 1), value=-1.0) == 0, 0.0, mask) if mistake == "window" else mask
        s = s + mask
    sinks = given.get("s_aux")
    if sinks is not None and mistake != "no sinks":
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-2 if mistake == "over queries" else -1)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2).contiguous(), None


MISTAKES = [
    ("llama", "", None),
    ("gemma2", "", None),
    ("gpt_oss", "", None),
    ("llama", "no mask", "queries see causal order, the model's all keys"),
    ("llama", "repeat", "repeats whole groups where the call repeats each head"),
    ("llama", "twice the scale", "Logits × 2.0000 in the model"),
    ("gemma2", "no soft cap", "in the call, none in the model"),
    ("gpt_oss", "no sinks", "The model leaves out the call's sinks"),
    ("mistral", "window", "window of"),
    ("llama", "over queries", "softmax over the queries"),
]


@pytest.mark.parametrize(("name", "mistake", "says"), MISTAKES)
def test_a_registered_function_that_computes_something_else_is_named(name, mistake, says):
    from functools import partial

    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("ours", partial(attend, mistake))
    AttentionMaskInterface.register("ours", eager_mask)
    torch.manual_seed(0)
    model = make_model(name, head_dim=8)
    model.config._attn_implementation = "ours"
    found = run_check("computes_otherwise", model, make_batch(name))
    assert (found == []) == (says is None)
    assert says is None or says in found[0].evidence


def test_numbers_of_modules_that_were_changed_are_named():
    model, batch = make_model("llama"), make_batch("llama")
    assert run_check("settings_of_config", model, batch) == []
    model.layers[1].self_attn.scaling = 1.0
    (found,) = run_check("settings_of_config", model, batch)
    assert found.code == "RG418"
    assert "layers.1.self_attn.scaling is 1, where its configuration gives 0.354" in found.evidence


def test_a_mask_of_the_batch_that_a_layer_does_not_use_is_named():
    model, ids = make_model("llama"), tokens(2, 12)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    seen[6:, :6] = False  # two documents
    batch = dict(input_ids=ids, attention_mask=seen.expand(2, 1, -1, -1))
    assert run_check("visible_keys", model, batch) == []
    for module in attentions(model):
        module.register_forward_pre_hook(
            lambda module, args, given: (args, {**given, "attention_mask": None}), with_kwargs=True
        )
    assert codes(run_check("visible_keys", model, batch)) == ["RG430"]
