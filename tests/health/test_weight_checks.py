"""Weights and gradients: a sound model, and the same with weights that were not loaded, tied, made or trained."""

import copy
import types

import pytest
import torch
from contract_data import codes, run_check
from handwritten_models import HandModel, random_ids
from torch import nn

from regard.health.models.inputs import sample_text
from regard.health.models.tiny import checkpoint, encode


def trained():
    model, _ = checkpoint("tiny-unscaled")
    return model


def text():
    return encode(sample_text()[:192]).view(2, 96)


def reset_layer(model):
    for module in (model.blocks[1].attention.qkv, model.blocks[1].attention.out):
        nn.init.normal_(module.weight, std=0.02)


def reset_norm(model):
    nn.init.ones_(model.blocks[2].before_mlp.weight)
    nn.init.zeros_(model.blocks[2].before_mlp.bias)


def share_layers(model):
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)


def detach_values(model):
    model.blocks[1].attention.qkv.register_forward_hook(lambda module, inputs, output: output.detach())


CASES = [
    ("untrained_layers", reset_layer, "RG611"),
    ("constant_vectors", reset_norm, "RG610"),
    ("tied_weights", share_layers, "RG613"),
    ("gradients", detach_values, "RG620"),
]


@pytest.mark.parametrize(("check", "breaks", "code"), CASES)
def test_a_changed_model_is_found_and_its_twin_is_not(check, breaks, code):
    model = trained()
    assert codes(run_check(check, model, text())) == []
    breaks(model)
    assert codes(run_check(check, model, text())) == [code]


@pytest.mark.parametrize("check", ["untrained_layers", "constant_vectors", "tied_weights", "gradients"])
def test_a_new_model_is_no_finding(check):
    assert codes(run_check(check, HandModel(), random_ids())) == []


def test_one_matrix_that_looks_random_is_a_note():
    model = trained()
    nn.init.normal_(model.blocks[1].attention.qkv.weight, std=0.02)
    assert [(f.code, f.severity) for f in run_check("untrained_layers", model, text())] == [("RG611", "note")]


class KeysForValues(nn.Module):
    """Attention that weighs its keys: the values of a stacked projection are never used."""

    def __init__(self, right):
        super().__init__()
        torch.manual_seed(0)
        self.right = right
        self.embedding, self.qkv, self.head = nn.Embedding(40, 16), nn.Linear(16, 48), nn.Linear(16, 40)

    def forward(self, ids):
        q, k, v = self.qkv(self.embedding(ids)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        o = nn.functional.scaled_dot_product_attention(q, k, v if self.right else k, is_causal=True)
        return self.head(o.transpose(1, 2).flatten(2))


def test_a_part_of_a_stacked_projection_without_gradient_is_named():
    assert run_check("gradients", KeysForValues(True), random_ids()) == []
    found = run_check("gradients", KeysForValues(False), random_ids())
    assert codes(found) == ["RG620"]
    assert "rows 32 to 47 of 48 in qkv.weight" in found[0].evidence


class Scaled(KeysForValues):
    """A parameter that training alone follows, a second output uses, or nothing does."""

    def __init__(self, use):
        super().__init__(True)
        self.use, self.scale = use, nn.Parameter(torch.ones(1, 16))

    def forward(self, ids):
        output = super().forward(ids)
        if self.use == "training":
            return output * (self.scale if self.training else self.scale.detach()).mean()
        pooled = self.embedding(ids).mean(1) * (self.scale if self.use == "second" else 1.0)
        return {"logits": output, "pooled": pooled}


@pytest.mark.parametrize(("use", "wanted"), [("training", []), ("second", []), ("nowhere", ["RG620"])])
def test_where_a_parameter_gets_its_gradient(use, wanted):
    assert codes(run_check("gradients", Scaled(use), random_ids())) == wanted


class Empty(nn.Module):
    """Attention whose first row sees no key, with its NaN replaced in the output and not in the gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(40, 16), nn.Linear(16, 48), nn.Linear(16, 40)

    def forward(self, ids):
        q, k, v = self.qkv(self.embedding(ids)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        s = q @ k.transpose(-1, -2) / 8**0.5
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(), -torch.inf)
        o = (s.softmax(-1) @ v).nan_to_num(0.0)
        return self.head(o.transpose(1, 2).flatten(2))


def test_gradients_of_rows_without_keys_are_named():
    assert "RG510" in codes(run_check("gradients", Empty(), random_ids()))


def test_tied_weights_that_came_apart_are_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    assert codes(run_check("tied_weights", model, random_ids())) == []
    model.lm_head.weight = nn.Parameter(copy.deepcopy(model.lm_head.weight) + 0.01)
    assert codes(run_check("tied_weights", model, random_ids())) == ["RG612"]


def test_a_norm_of_queries_that_never_runs_is_named():
    pytest.importorskip("transformers")
    from hf_models import make_batch, make_model
    from transformers.models.llama.modeling_llama import LlamaAttention

    model, batch = make_model("qwen3"), make_batch("qwen3")
    assert run_check("qk_norm", model, batch) == []
    for layer in model.layers:
        layer.self_attn.forward = types.MethodType(LlamaAttention.forward, layer.self_attn)
    assert codes(run_check("qk_norm", model, batch)) == ["RG417"]


def test_parameters_of_a_second_output_have_gradients():
    class TwoTowers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.TransformerEncoderLayer(32, 4, batch_first=True) for _ in range(2))

        def forward(self, x):
            return self.first(x), self.second(x) if self.is_read else self.second(x).detach()

    model = TwoTowers()
    for model.is_read in (True, False):
        found = run_check("gradients", model, torch.randn(2, 12, 32))
        assert [one.code for one in found] == ([] if model.is_read else ["RG620"])
