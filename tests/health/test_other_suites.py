"""What transformers' own models asked of `examine` and `using`."""

import pytest
import torch
from torch import nn

import regard
from regard.health.measure.batches import max_positions

transformers = pytest.importorskip("transformers")
from hf_models import VISION, make_batch, make_model  # noqa: E402


def test_a_model_that_accelerate_offloads():
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, batch = make_model("llama"), make_batch("llama")
    expected = regard.examine(model, [batch])
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).is_meta
    found = regard.examine(offloaded, [batch])
    assert found.unmeasured == []
    for head, same in zip(found.heads, expected.heads, strict=True):
        assert head.statistics["entropy"].mean == same.statistics["entropy"].mean


class Tower(nn.Module):
    main_input_name = "input_features"

    def __init__(self):
        super().__init__()
        self.embed_positions = nn.Embedding(5, 8)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.wpe = Tower(), nn.Embedding(64, 8)


def test_a_table_of_sounds_does_not_limit_the_text():
    assert max_positions(Listener()) == 64


def test_a_float64_model_whose_softmax_runs_in_float32():
    config = transformers.SiglipVisionConfig(**VISION, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(config).double()
    assert regard.examine(model, [dict(pixel_values=10 * torch.randn(2, 3, 16, 16).double())]).unmeasured == []


class AttnBlock(nn.Module):
    """Attention without torch's softmax: an exponential and a sum."""

    def forward(self, x):
        e = (x @ x.mT).exp()
        return (e / e.sum(-1, keepdim=True)) @ x


def test_a_block_named_attention_is_listed():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), AttnBlock())
    report = regard.examine(model, [0.1 * torch.randn(2, 6, 8)])
    assert [name for name, _ in report.unmeasured] == ["1"]


class Distances(nn.Module):
    def forward(self, x):
        p = torch.cdist(x, x).neg().softmax(-1)
        return p @ x  # the line that is named


def test_weights_of_other_scores_are_named_with_their_line():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), Distances())
    ((name, reason),) = regard.examine(model, [torch.randn(2, 6, 8)]).unmeasured
    line = Distances.forward.__code__.co_firstlineno + 2
    assert name == "1" and f"test_other_suites.py:{line}" in reason and "q·kᵀ" in reason


def test_weights_are_returned_where_only_the_call_asks_for_them():
    config = transformers.Pix2StructVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        patch_embed_hidden_size=12,
        d_ff=48,
        d_kv=8,
        seq_len=10,
    )
    model = transformers.Pix2StructVisionModel(config).eval()
    model.set_attn_implementation("eager")
    batch = dict(flattened_patches=torch.rand(1, 6, 14), output_attentions=True)
    with torch.no_grad(), regard.using(model, normalizer="sparsemax"):
        (p,) = model(**batch).attentions
    assert p.shape == (1, 4, 6, 6)
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 4, 6))


def make_timesfm():
    config = transformers.TimesFmConfig(
        patch_length=8,
        context_length=32,
        horizon_length=8,
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        head_dim=8,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    return transformers.TimesFmModelForPrediction(config), dict(past_values=[torch.randn(32)] * 2, freq=[0, 0])


def make_bridgetower():
    sizes = dict(hidden_size=64, num_hidden_layers=3)
    text = dict(**sizes, num_attention_heads=2, intermediate_size=32, vocab_size=40, max_position_embeddings=40)
    config = transformers.BridgeTowerConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        text_config=text,
        vision_config=dict(**sizes, patch_size=8, image_size=16),
        attn_implementation="eager",
    )
    batch = dict(input_ids=torch.randint(3, 40, (2, 7)), pixel_values=torch.randn(2, 3, 16, 16))
    return transformers.BridgeTowerModel(config), batch


@pytest.mark.parametrize("make", [make_timesfm, make_bridgetower])
@pytest.mark.parametrize("asked", ["by the caller", "by the configuration"])
def test_weights_are_those_that_were_swapped_in(make, asked):
    torch.manual_seed(0)
    model, batch = make()
    model.eval().config.output_attentions = asked == "by the configuration"
    wish = {"output_attentions": True} if asked == "by the caller" else {}
    with torch.no_grad():
        own = model(**batch, **wish).attentions
        with regard.using(model, normalizer="softmax", temperature=1.0):
            same = model(**batch, **wish).attentions
        with regard.using(model, normalizer="sparsemax"):
            sparse = model(**batch, **wish).attentions
    assert len(own) == 2
    torch.testing.assert_close(same, own)
    weights = [p for layer in sparse for p in (layer if isinstance(layer, tuple) else (layer,))]
    assert all((p.sum(-1) - 1).abs().max() < 1e-5 for p in weights) and any((p == 0).any() for p in weights)
