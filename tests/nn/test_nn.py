"""regard.nn.MultiheadAttention: torch's own output, four scores, a cache, and weights that outlive the normaliser."""

import copy

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from regard.nn import Cache, MultiheadAttention
from regard.nn.validation import SCORES


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


def test_torchs_weights_that_are_assigned_have_memory_of_their_own(tmp_path):
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.device("meta"):
        ours = MultiheadAttention(8, 2)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    stores = [parameter.untyped_storage() for parameter in ours.parameters()]
    assert len({store.data_ptr() for store in stores}) == len(stores)
    x = torch.randn(1, 4, 8)
    assert torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(ours, str(tmp_path / "ours.safetensors"))  # refuses parts of one tensor


def test_a_state_dict_survives_a_change_of_normaliser():
    first = MultiheadAttention(8, 2, normalizer="softmax")
    for name in regard.normalizers.names():
        other = MultiheadAttention(8, 2, normalizer=name)
        other.load_state_dict(first.state_dict())
        assert torch.equal(other.q_proj.weight, first.q_proj.weight)


@pytest.mark.parametrize("score", SCORES)
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


@pytest.mark.parametrize("score", SCORES)
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


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
@pytest.mark.parametrize("window", [None, (2, None), (1, 0), (None, 0)])
def test_a_cache_keeps_window_mask_and_lengths_in_place(score, window):
    layer = MultiheadAttention(8, 2, kv_heads=1, score=score).double().eval()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, 9, 9) > 0.2
    mask |= torch.eye(9, dtype=torch.bool)
    seen = mask & regard.masks.window(9, left=None if window is None else window[0], right=0)
    seen &= regard.masks.padding([9, 8], 9)[:, None, None]
    whole = layer(x, attn_mask=seen)
    _, cache = layer(x[:, :6], cache=True)
    options = dict(is_causal=True, window=window, key_lengths=torch.tensor([9, 8]))
    last, _ = layer(x[:, 6:], attn_mask=mask[:, :, 6:], cache=cache, **options)
    assert torch.allclose(last, whole[:, 6:], atol=1e-10)
    assert torch.allclose(layer(x, attn_mask=mask, **options), whole, atol=1e-10)


@pytest.mark.parametrize(("make", "right"), [(causal_upper_left, 0), (causal_lower_right, 4)])
def test_a_causal_bias_counts_the_keys_of_a_cache(make, right):
    layer, x = MultiheadAttention(8, 2).eval(), torch.randn(1, 6, 8)
    _, cache = layer(x[:, :4], cache=True)
    want, _ = layer(x[:, 4:], attn_mask=regard.masks.window(2, 6, right=right), cache=cache)
    assert torch.allclose(layer(x[:, 4:], attn_mask=make(2, 6), cache=cache)[0], want, atol=1e-6)


def test_additive_blocks_are_the_whole(monkeypatch):
    layer = MultiheadAttention(8, 2, score="additive")
    x = torch.randn(1, 9, 8)
    mask = torch.randn(9, 9)
    whole = layer(x, attn_mask=mask, key_lengths=torch.tensor([6]))
    monkeypatch.setattr(regard.nn.additive, "BLOCK", 2)
    assert torch.allclose(layer(x, attn_mask=mask, key_lengths=torch.tensor([6])), whole, atol=1e-6)


@pytest.mark.parametrize("policy", [2.0, "learned", regard.temperature.SSMax(), regard.temperature.Adaptive()])
def test_additive_takes_every_option(policy):
    layer = MultiheadAttention(8, 2, score="additive", temperature=policy, softcap=1.5, sink=True).double()
    torch.nn.init.normal_(layer.sink)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    out, stats = layer(x, is_causal=True, return_stats=True)
    q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    s = (layer.additive[:, None, None] * torch.tanh(q[:, :, :, None] + k[:, :, None])).sum(-1)
    s = 1.5 * torch.tanh(s / 1.5)
    seen = regard.masks.causal(6).expand(s.shape)
    if policy == 2.0:
        s = s / 2.0
    elif isinstance(policy, regard.temperature.SSMax):
        s = s * 0.43 * torch.arange(1.0, 7.0).clamp_min(2).log().double()[:, None]
    elif isinstance(policy, regard.temperature.Adaptive):
        entropy = regard.statistics.of_scores(s, seen, "softmax")["entropy"]
        s = s / policy(None, lambda names: dict(entropy=entropy))[..., None]
    top = s.masked_fill(~seen, -torch.inf)
    z = top.exp().sum(-1, keepdim=True) + layer.sink.exp()[:, None, None]
    want = layer.out_proj((top.exp() / z @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(out, want, atol=1e-10)
    assert torch.allclose(stats.mass, (top.exp() / z).sum(-1), atol=1e-10)
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


POLICIES = {
    "learned": lambda: "learned",
    "ssmax": lambda: regard.temperature.SSMax(torch.tensor([0.3, 0.6]), learn=True),
    "adaptive": lambda: "adaptive",
    "query": lambda: "query_dependent",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("score", SCORES)
def test_policies_learn_inside_every_score(policy, score):
    layer = MultiheadAttention(8, 2, score=score, sink=True, softcap=5.0, temperature=POLICIES[policy]())
    x = torch.randn(2, 5, 8)
    layer(x, is_causal=True).square().sum().backward()
    missing = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing in ([], ["k_proj.bias"])  # a key's bias moves a row of dot products as a whole
    other = MultiheadAttention(8, 2, score=score, sink=True, normalizer="softmax1", temperature=POLICIES[policy]())
    assert other.load_state_dict(layer.state_dict()).missing_keys == []


def test_dropout_is_for_training():
    x = torch.randn(2, 5, 8)
    layer = MultiheadAttention(8, 2, dropout=0.5)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_copies_and_files_do_not_carry_activations(tmp_path):
    layer = MultiheadAttention(8, 2)
    layer(torch.randn(2, 5, 8))
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        assert not other._last and torch.equal(other.q_proj.weight, layer.q_proj.weight)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 16}])
def test_what_was_frozen_stays_frozen(sizes):
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, **sizes).requires_grad_(False)
    theirs.out_proj.requires_grad_(True)
    ours = MultiheadAttention.from_torch(theirs, temperature="learned")
    learns = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert learns == {"out_proj.weight", "out_proj.bias", "temperature.log_temperature"}


def test_weights_that_do_not_fit_are_refused():
    theirs = torch.nn.MultiheadAttention(8, 2, add_bias_kv=True)
    with pytest.raises(ValueError, match="add_bias_kv"):
        MultiheadAttention.from_torch(theirs)
    with pytest.raises(RuntimeError, match="size mismatch"):
        MultiheadAttention.from_torch(torch.nn.MultiheadAttention(8, 2, batch_first=True), kv_heads=1)
    with pytest.raises(ValueError, match=r"batch_first=False: it takes \(L, B, embed_dim\)"):
        MultiheadAttention.from_torch(torch.nn.MultiheadAttention(8, 2))
    with pytest.raises(TypeError, match="Linear"):
        MultiheadAttention.from_torch(torch.nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(score="dotty"), "score"),
        (dict(num_heads=3), "num_heads"),
        (dict(num_heads=2.0), "num_heads"),
        (dict(embed_dim=0), "embed_dim"),
        (dict(kv_heads=4), "kv_heads"),
        (dict(kdim=-1), "kdim"),
        (dict(normalizer="sofmax"), "softmax"),
        (dict(temperature="warm"), "temperature"),
        (dict(temperature=0.0), "positive"),
        (dict(temperature=torch.ones(2)), "temperature"),
        (dict(softcap=-1.0), "softcap"),
        (dict(dropout=1.0), "dropout"),
        (dict(batch_first=False), "batch_first"),
        (dict(sink=True, normalizer="entmax15"), "sink"),
    ],
)
def test_nonsense_is_named(options, word):
    with pytest.raises(ValueError, match=word):
        MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **options})


X = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda layer: layer(X[0]), ValueError, r"query must have shape \(B, L, 8\), got \(5, 8\)"),
        (lambda layer: layer(X[..., :6]), ValueError, "query"),
        (lambda layer: layer(X, X[..., :6]), ValueError, r"key must have shape \(B, L, 8\)"),
        (lambda layer: layer(X, X[:1]), ValueError, "batch of query"),
        (lambda layer: layer(X, X, X[:, :3]), ValueError, "same length"),
        (lambda layer: layer("x"), TypeError, "query"),
        (lambda layer: layer(X, cache="old"), TypeError, "cache"),
        (lambda layer: layer(X, cache=Cache(X, X)), ValueError, r"cache.k must have shape \(2, 2, N, 4\)"),
        (lambda layer: layer(X, window=(-1, 0)), ValueError, "window"),
        (lambda layer: layer(X, return_stats="entropie"), ValueError, "entropy"),
    ],
)
def test_a_bad_call_is_named(call, error, word):
    with pytest.raises(error, match=word):
        call(MultiheadAttention(8, 2))


def test_compiled_whole():
    layer, x = MultiheadAttention(8, 2, kv_heads=1, normalizer="entmax15", temperature="ssmax"), torch.randn(2, 5, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, is_causal=True), layer(x, is_causal=True), atol=1e-6)
    torch._dynamo.reset()


def test_key_lengths_that_end_before_the_window_behind_a_cache():
    layer = regard.nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(2, 12, 8)
    _, cache = layer(x[:, :10], cache=True)
    out, _ = layer(x[:, 10:], cache=cache, window=(2, 0), key_lengths=[3, 12])
    whole = layer(x, window=(2, 0), key_lengths=[3, 12])[:, 10:]
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(out[0], layer.out_proj.bias.expand(2, 8))  # it sees no key


def test_an_entropy_penalty_reaches_additive_scores():
    layer = regard.nn.MultiheadAttention(8, 2, score="additive").double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    weight = layer.q_proj.weight

    def entropy():
        return layer(x, is_causal=True, return_stats=("entropy", "participation"))[1]

    assert not entropy().participation.requires_grad
    (slope,) = torch.autograd.grad(entropy().entropy.sum(), weight)
    step = torch.randn_like(weight)
    with torch.no_grad():
        weight += 1e-5 * step
        above = entropy().entropy.sum()
        weight -= 2e-5 * step
        below = entropy().entropy.sum()
    torch.testing.assert_close((slope * step).sum(), (above - below) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        (dict(attn_mask=torch.ones(5, 5, dtype=torch.long)), TypeError, "attn_mask must be bool"),  # it would be added
        (dict(attn_mask=torch.ones(3, 5, dtype=torch.bool)), ValueError, r"attn_mask must broadcast to \(2, 2, 5, 5\)"),
        (dict(attn_mask=[[True]]), TypeError, "attn_mask must be a tensor"),
        (dict(key_lengths=[5, 9]), ValueError, r"key_lengths must lie in \[0, 5\]"),
        (dict(key_lengths=[-1, 5]), ValueError, r"key_lengths must lie in \[0, 5\]"),
        (dict(key_lengths=[3]), ValueError, r"key_lengths must have shape \(2,\)"),
        (dict(key_lengths="ab"), TypeError, "key_lengths must be ints"),
        (dict(is_causal="no"), TypeError, "is_causal"),
    ],
)
def test_every_score_refuses_the_same_nonsense(score, options, error, word):
    with pytest.raises(error, match=word):
        MultiheadAttention(8, 2, score=score)(X, **options)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("policy", "error", "word"),
    [
        (lambda count, rows: -torch.ones(()), ValueError, "positive"),
        (lambda count, rows: torch.ones(7), ValueError, "must broadcast"),
        (lambda count, rows: 2.0, TypeError, "must return a tensor"),
        (regard.temperature.Learned(4), ValueError, r"temperature must .* broadcast to \(2, 2, 5, 1\)"),
    ],
)
def test_every_score_checks_its_temperature(score, policy, error, word):
    with pytest.raises(error, match=word):
        MultiheadAttention(8, 2, score=score, temperature=policy)(X)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", [torch.tensor([True, False, True, True, False]), torch.linspace(-1.0, 1.0, 5)])
def test_a_mask_may_have_one_dimension(score, mask):
    layer, x = MultiheadAttention(8, 2, score=score), torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x, attn_mask=mask), layer(x, attn_mask=mask.expand(5, 5)))


@pytest.mark.parametrize("score", SCORES)
def test_no_queries_have_all_their_statistics(score):
    layer = MultiheadAttention(8, 2, score=score)
    out, stats = layer(torch.randn(2, 0, 8), torch.randn(2, 3, 8), return_stats=True)
    assert out.shape == (2, 0, 8) and set(stats) == set(regard.statistics.NAMES)
    assert all(numbers.shape == (2, 2, 0) for numbers in stats.values())
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())  # as other ranks have them


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_soft_cap_far_above_additive_scores_is_none(dtype):
    free, capped = (MultiheadAttention(8, 2, score="additive", softcap=cap, dtype=dtype) for cap in (None, 1e9))
    capped.load_state_dict(free.state_dict())
    x = X.to(dtype)
    wanted, got = (layer(x, return_stats=("logit_variance",))[1].logit_variance for layer in (free, capped))
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=0)
    with pytest.raises(ValueError, match="softcap must lie between"):  # all would be NaN
        MultiheadAttention(8, 2, score="additive", softcap=1e300, dtype=dtype)(x)


@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "additive"])
def test_packed_documents_are_calls_by_themselves(score):
    torch.manual_seed(0)
    layer = regard.nn.MultiheadAttention(16, 4, normalizer="entmax15", score=score)
    x = torch.randn(1, 11, 16)
    options = dict(is_causal=True, window=(2, None), return_stats=("distance", "visible_keys"))
    out, stats = layer(x, cu_seqlens=[0, 4, 4, 11], **options)
    parts = [layer(x[:, :4], **options), layer(x[:, 4:], **options)]
    torch.testing.assert_close(out, torch.cat([part for part, _ in parts], 1), atol=1e-5, rtol=1e-5)
    for name in stats:
        torch.testing.assert_close(stats[name], torch.cat([own[name] for _, own in parts], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
def test_masks_and_biases_are_their_dense_tensors(score):
    torch.manual_seed(0)
    layer = regard.nn.MultiheadAttention(16, 4, score=score)
    x, mask, alibi = torch.randn(2, 9, 16), regard.Mask.prefix([3, 5]), regard.bias.alibi(4)
    dense = alibi.dense(torch.zeros(2, 4, 9, 4), 9).masked_fill(~mask.dense(9, 9), -torch.inf)
    torch.testing.assert_close(layer(x, attn_mask=(mask, alibi)), layer(x, attn_mask=dense), atol=1e-5, rtol=1e-5)
    lengths = regard.Mask.lengths([9, 8])
    _, cache = layer(x[:, :6], cache=True)
    out, _ = layer(x[:, 6:], attn_mask=lengths, is_causal=True, window=(4, None), cache=cache)
    whole = layer(x, attn_mask=lengths, is_causal=True, window=(4, None))
    torch.testing.assert_close(out, whole[:, 6:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("length", "batch", "options", "message"),
    [
        (9, 2, dict(cu_seqlens=[0, 9]), "got a batch of 2"),
        (9, 1, dict(cu_seqlens=[0, 8]), "cu_seqlens must end at the number of tokens, 9, got 8"),
        (9, 1, dict(cu_seqlens=[0, 9], key_lengths=[3]), "key_lengths beside it must be None"),
        (9, 1, dict(cu_seqlens=[0, 9], cache=True), "cache beside it must be None"),
    ],
)
def test_packed_input_that_does_not_fit(length, batch, options, message):
    layer = regard.nn.MultiheadAttention(16, 4)
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(batch, length, 16), **options)


@pytest.mark.parametrize("make", [MultiheadAttention, regard.nn.DifferentialAttention])
def test_another_dtype_than_the_parameters_is_refused_by_name(make):
    layer = make(8, 2)
    with pytest.raises(TypeError, match=r"query must have the dtype .*, torch.float32, got torch.float64; convert"):
        layer(X.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(X.bfloat16()).dtype == torch.bfloat16
