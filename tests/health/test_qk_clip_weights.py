"""Which weights `regard.qk_clip` may shrink: each once, none that serves something else, is computed or is frozen."""

import pytest
import torch
from qk_clip_data import Self, exploded, logits, ours, step
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import regard


@pytest.mark.parametrize("tied", ["weight", "bias", "module", "both", "data"])
def test_queries_and_keys_that_share_weights_shrink_once(tied):
    model, _ = exploded(ours)
    layer = model[1]
    with torch.no_grad():
        for one in (layer.q_proj, layer.k_proj):
            nn.init.normal_(one.bias)
    if tied in ("weight", "both"):
        layer.k_proj.weight = layer.q_proj.weight
    if tied in ("bias", "both"):
        layer.k_proj.bias = layer.q_proj.bias
    if tied == "module":
        layer.k_proj = layer.q_proj
    if tied == "data":
        layer.k_proj.weight.data = layer.q_proj.weight.data
    x = torch.randn(2, 6, 16)
    step(model, x)
    before = logits(model, x, "1")
    clipped = regard.qk_clip(model, 50.0)
    assert before[0] > 50.0 and clipped.skipped == {}
    assert torch.allclose(logits(model, x, "1"), before.clamp_max(50.0), rtol=1e-4)


@pytest.mark.parametrize("shared", ["query and key", "query", "value", "embedding"])
def test_weights_that_serve_something_else_are_skipped(shared):
    torch.manual_seed(0)
    model = nn.Sequential(ours(), ours(), ours())
    skipped = {"0", "1"} if "query" in shared else {"1"}
    if "query" in shared:
        model[1].q_proj = model[0].q_proj
    if shared == "query and key":
        model[1].k_proj = model[0].k_proj
    if shared == "value":
        model[1].v_proj = model[1].k_proj
    if shared == "embedding":
        model.append(nn.Linear(16, 16))
        model[3].weight = model[1].q_proj.weight
    with torch.no_grad():
        for layer in model[:3]:
            layer.q_proj.weight *= 300
    x = torch.randn(2, 6, 16)
    step(model, x)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    clipped = regard.qk_clip(model, 1.0)
    assert clipped.skipped.keys() == skipped and all("serve another" in why for why in clipped.skipped.values())
    assert {clip.layer for clip in clipped.heads} == {"0", "1", "2"} - skipped
    for name, value in model.state_dict().items():
        assert name[0] not in skipped or torch.equal(value, weights[name])


class Twice(nn.Module):
    """One attention in two places."""

    def __init__(self, attention):
        super().__init__()
        self.first, self.second = nn.Sequential(attention), nn.Sequential(attention)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("attention", [ours, Self])
def test_one_module_in_two_places_is_clipped_by_its_largest(attention):
    torch.manual_seed(0)
    model, x = Twice(attention()), torch.randn(2, 6, 16)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "q_proj.weight" in name or "in_proj_weight" in name:
                value[:16] *= 300
    regard.qk_clip(model, 5.0)
    step(model, x)
    (tops,) = (clipped := regard.qk_clip(model, 5.0)).max_logit.values()
    assert clipped.skipped == {} and max(tops) > 50.0
    step(model, x)
    (tops,) = regard.qk_clip(model, 1e9).max_logit.values()
    assert max(tops) < 10.0  # its second place sees other inputs now


class Adapted(nn.Module):
    """A linear layer and what was learned beside it, as PEFT wraps it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora = base, nn.Parameter(torch.zeros(16, 16))
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + x @ self.lora


class Low(nn.Linear):
    """The same as a subclass of nn.Linear."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.lora_a = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_a


def _double(layer, name):
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    parametrize.register_parametrization(layer, name, Double())


@pytest.mark.parametrize("side", ["q_proj", "k_proj"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: parametrizations.spectral_norm(layer),
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        lambda layer: _double(layer, "bias") or layer,
        lambda layer: Adapted(layer),
        lambda layer: Low(16, 16),
    ],
    ids=["weight_norm", "spectral_norm", "prune", "bias", "wrapper", "subclass"],
)
def test_computed_weights_are_skipped(wrap, side):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), ours())
    setattr(model[1], side, wrap(getattr(model[1], side)))
    step(model, torch.randn(2, 6, 16))
    weights = [value.clone() for value in model.parameters()]
    clipped = regard.qk_clip(model, 1e-3)
    assert clipped.heads == [] and ("computed from" in clipped.skipped["1"] or "adds to" in clipped.skipped["1"])
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
def test_computed_weights_of_torchs_module_are_skipped(name):
    model, x = Self(), torch.randn(2, 6, 16)
    _double(model.inner, name)
    regard.qk_clip(model, 1e-3)
    step(model, x)
    assert f"the {name} of its" in regard.qk_clip(model, 1e-3).skipped["inner"]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("frozen", ["q_proj", "k_proj", "q_proj and k_proj", "q_proj.bias"])
def test_frozen_weights_stay_as_they_are(frozen, kv_heads):
    """The other side takes the whole factor, unless its head serves several queries."""
    model, _ = exploded(ours, kv_heads=kv_heads)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen.split(" and ")))
    x = torch.randn(2, 6, 16)
    step(model, x)
    before, weights = logits(model, x, "1"), {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        clipped = regard.qk_clip(model, 50.0)
    kept = [name for name in weights if any(part.split(".")[0] in name for part in frozen.split(" and "))]
    assert kept and all(torch.equal(model.state_dict()[name], weights[name]) for name in kept)
    if frozen == "q_proj and k_proj" or (kv_heads == 2 and "q_proj" in frozen):
        assert clipped.heads == [] and "frozen" in clipped.skipped["1"]
        assert torch.allclose(logits(model, x, "1"), before)
    else:
        assert [clip.head for clip in clipped.heads] == [0] and clipped.skipped == {}
        assert torch.allclose(logits(model, x, "1"), before.clamp_max(50.0), rtol=1e-4)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 16, "vdim": 8}])
def test_a_key_that_is_learned_beside_the_weights_is_held_too(sizes):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True, **sizes)
    with torch.no_grad():
        layer.bias_k.mul_(300.0)
    keys = layer.bias_k.clone()
    x, value = torch.randn(2, 6, 16), torch.randn(2, 6, layer.vdim)
    regard.qk_clip(layer, 1.0)
    layer(x, x, value)[0].sum().backward()
    assert len(regard.qk_clip(layer, 1.0).heads) == 4
    layer(x, x, value)
    assert regard.qk_clip(layer, 1e9).max_logit[""] == pytest.approx([1.0] * 4, rel=1e-4)
    assert torch.equal(layer.bias_k, keys)
