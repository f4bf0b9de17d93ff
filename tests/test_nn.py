"""regard.nn.MultiheadAttention: torch's own output, four scores, a cache, and weights that outlive the normaliser."""

import pytest
import torch

import regard
from regard.nn import Cache, MultiheadAttention


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}, {"bias": False}])
def test_gives_what_torchs_module_gives(sizes):
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True, **sizes)
    if theirs.in_proj_bias is not None:
        torch.nn.init.normal_(theirs.in_proj_bias)
    ours = MultiheadAttention.from_torch(theirs)
    query = torch.randn(2, 5, 16)
    key, value = torch.randn(2, 7, sizes.get("kdim", 16)), torch.randn(2, 7, sizes.get("vdim", 16))
    mask = torch.rand(5, 7) > 0.3
    mask[:, 0] = True
    want = theirs(query, key, value, attn_mask=~mask)[0]
    assert torch.allclose(ours(query, key, value, attn_mask=mask), want, atol=1e-5)
    want, weights = theirs(query, key, value, average_attn_weights=False)
    out, stats = ours(query, key, value, return_stats=True)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(stats.max_weight, weights.amax(-1), atol=1e-5)


def test_loads_a_torch_state_dict_inside_a_model():
    theirs = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(8, 2, batch_first=True)})
    ours = torch.nn.ModuleDict({"attention": MultiheadAttention(8, 2)})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 4, 8)
    assert torch.allclose(ours["attention"](x), theirs["attention"](x, x, x)[0], atol=1e-6)


def test_a_state_dict_survives_a_change_of_normaliser():
    first = MultiheadAttention(8, 2, normalizer="softmax")
    for name in regard.normalizers.names():
        other = MultiheadAttention(8, 2, normalizer=name)
        other.load_state_dict(first.state_dict())
        assert torch.equal(other.q_proj.weight, first.q_proj.weight)


@pytest.mark.parametrize("score", regard.nn.SCORES)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax15", "sigmoid"])
def test_scores_learn_and_are_what_they_say(score, normalizer):
    layer = MultiheadAttention(8, 2, kv_heads=1, score=score, normalizer=normalizer, temperature="learned").double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    out, stats = layer(x, is_causal=True, return_stats=True)
    q = layer.q_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
    k, v = (p(x).unflatten(-1, (1, 4)).transpose(1, 2).expand(-1, 2, -1, -1) for p in (layer.k_proj, layer.v_proj))
    if score == "additive":
        s = (layer.additive[:, None, None] * torch.tanh(q[:, :, :, None] + k[:, :, None])).sum(-1)
    elif score == "cosine":
        unit_q, unit_k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
        s = layer.gain[:, None, None] * unit_q @ unit_k.transpose(-1, -2)
    else:
        s = q @ k.transpose(-1, -2) * (0.5 if score == "scaled_dot" else 1.0)
    p = regard.normalize(s, normalizer, mask=regard.masks.causal(6))
    want = layer.out_proj((p @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(out, want, atol=1e-10)
    dense = regard.statistics.of_scores(s, regard.masks.causal(6).expand(s.shape), normalizer)
    assert all(torch.allclose(stats[name], dense[name], atol=1e-8) for name in dense)
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("score", regard.nn.SCORES)
def test_a_cache_continues_the_sequence(score):
    layer = MultiheadAttention(8, 2, score=score).eval()
    x = torch.randn(2, 7, 8)
    whole = layer(x, is_causal=True)
    first, cache = layer(x[:, :3], is_causal=True, cache=True)
    parts = [first]
    for t in range(3, 7, 2):
        out, cache = layer(x[:, t : t + 2], is_causal=True, cache=cache)
        parts.append(out)
    assert isinstance(cache, Cache) and cache.k.shape[2] == 7
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)


def test_additive_blocks_are_the_whole(monkeypatch):
    layer = MultiheadAttention(8, 2, score="additive")
    x = torch.randn(1, 9, 8)
    mask = torch.randn(9, 9)
    whole = layer(x, attn_mask=mask, key_lengths=torch.tensor([6]))
    monkeypatch.setattr(regard.nn, "BLOCK", 2)
    assert torch.allclose(layer(x, attn_mask=mask, key_lengths=torch.tensor([6])), whole, atol=1e-6)


def test_sink_softcap_dropout_and_policies():
    x = torch.randn(2, 5, 8)
    layer = MultiheadAttention(8, 2, sink=True, softcap=5.0, dropout=0.5, temperature=regard.temperature.SSMax())
    layer(x).sum().backward()
    assert layer.sink.grad is not None
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(score="dotty"), "score"),
        (dict(num_heads=3), "num_heads"),
        (dict(kv_heads=4), "kv_heads"),
        (dict(normalizer="sofmax"), "softmax"),
        (dict(temperature="warm"), "temperature"),
        (dict(score="additive", sink=True), "additive"),
    ],
)
def test_nonsense_is_named(options, word):
    with pytest.raises(ValueError, match=word):
        MultiheadAttention(8, **{"num_heads": 2, **options})
