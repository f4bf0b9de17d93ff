"""regard.qk_clip: after an ordinary step, every head's largest logit is at most the threshold, the others untouched."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import regard
from regard.health import intercept
from regard.nn.projections import NotFound, projections


def logits(model, batch, layer="") -> torch.Tensor:
    """[H]: the largest logit of each head of a layer, by examining the model."""
    heads = regard.examine(model, [batch]).heads
    return torch.tensor([head.statistics["max_logit"].max for head in heads if head.layer == layer])


def step(model, batch, lr=1e-12) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    (getattr(out, "last_hidden_state", out)).float().square().mean().backward()
    optimizer.step()


class Self(nn.Module):
    """torch's module as self-attention."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x, x[..., : self.inner.kdim], x, need_weights=False)[0]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("score", ["scaled_dot", "dot"])
def test_regard_nn_after_its_first_step(kv_heads, score):
    torch.manual_seed(kv_heads)
    model = nn.Sequential(nn.LayerNorm(16), regard.nn.MultiheadAttention(16, 4, kv_heads=kv_heads, score=score))
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            nn.init.normal_(getattr(model[1], name).bias)
        model[1].q_proj.weight[4:8] *= 300  # head 1
        model[1].q_proj.weight[12:] *= 30  # head 3
    x = torch.randn(3, 9, 16)
    step(model, x)
    before, was = logits(model, x, "1"), copy.deepcopy(model)
    threshold = before.sort().values[1:3].mean().item()
    clipped = regard.qk_clip(model, threshold)
    assert [(clip.layer, clip.head) for clip in clipped.heads] == [("1", 1), ("1", 3)]
    assert torch.allclose(torch.tensor(clipped.max_logit["1"]), before, rtol=1e-4)
    after = logits(model, x, "1")
    assert torch.allclose(after, before.clamp_max(threshold), rtol=1e-4)
    rows = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    assert torch.equal(model[1].q_proj.weight[rows], was[1].q_proj.weight[rows])
    ratio = (model[1].q_proj.weight / was[1].q_proj.weight)[4].mean().item()
    factor = threshold / before[1].item()
    assert ratio == pytest.approx(factor if kv_heads < 4 else math.sqrt(factor), rel=1e-4)
    if kv_heads < 4:
        assert torch.equal(model[1].k_proj.weight, was[1].k_proj.weight)
    assert intercept.ACTIVE == []


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 16}, {"bias": False}])
def test_torchs_module_from_its_second_step(options):
    torch.manual_seed(0)
    model, x = Self(**options), torch.randn(2, 7, 16)
    with torch.no_grad():
        query = model.inner.in_proj_weight if model.inner.in_proj_weight is not None else model.inner.q_proj_weight
        query[4:8] *= 1e3
        if model.inner.in_proj_bias is not None:
            nn.init.normal_(model.inner.in_proj_bias)
    step(model, x)
    assert regard.qk_clip(model, 10.0).heads == []  # watching begins
    step(model, x)
    before = logits(model, x, "inner")
    clipped = regard.qk_clip(model, 10.0)
    assert [clip.head for clip in clipped.heads] == (before > 10.0).nonzero()[:, 0].tolist() != []
    assert torch.allclose(logits(model, x, "inner"), before.clamp_max(10.0), rtol=1e-4)
    assert regard.qk_clip(model, 10.0).heads == []  # no forward since
    regard.qk_clip.stop(model)
    assert not model._forward_hooks and not model._forward_pre_hooks


def small(kind):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=50)
    if kind == "llama":
        config, layer = transformers.LlamaConfig(**sizes, num_key_value_heads=2), "layers.1.self_attn"
    elif kind == "bert":
        config, layer = transformers.BertConfig(**sizes), "encoder.layer.1.attention.self"
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
        layer = "h.1.attn"
    else:
        config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8)
        layer = "layers.1.self_attn"
    torch.manual_seed(1)
    return transformers.AutoModel.from_config(config), layer


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_transformers_models(kind):
    model, layer = small(kind)
    attention = model.get_submodule(layer)
    with torch.no_grad():
        query, _ = projections(attention, 4, 8)
        query.weight.narrow(query.dim, 8, 8).mul_(3e3)  # head 1
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    regard.qk_clip(model, 5.0)
    step(model, batch)
    before = logits(model.eval(), batch, layer)
    clipped = regard.qk_clip(model, 5.0)
    assert before[1] > 5.0 and (layer, 1) in [(clip.layer, clip.head) for clip in clipped.heads]
    assert torch.allclose(logits(model, batch, layer), before.clamp_max(5.0), rtol=2e-3)


def test_what_does_not_grow_with_the_weights_is_skipped():
    model, layer = small("qwen3")
    regard.qk_clip(model, 1e-6)
    step(model.train(), dict(input_ids=torch.randint(50, (2, 9))))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    clipped = regard.qk_clip(model, 1e-6)
    assert clipped.heads == [] and "q_norm" in clipped.skipped[layer]
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    with pytest.raises(NotFound, match="cosine"):
        projections(regard.nn.MultiheadAttention(8, 2, score="cosine"), 2, 4)
    with pytest.raises(NotFound, match="no linear layers"):
        projections(nn.Linear(8, 8), 2, 4)


def test_masks_and_evaluation_do_not_count():
    model = regard.nn.MultiheadAttention(8, 2)
    x, keys = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    keys[:, 3:] *= 1e5  # only hidden keys are large
    seen = (torch.arange(6) < 3).expand(1, 1, 6, 6)
    hidden = torch.zeros(1, 1, 6, 6).masked_fill(~seen, -math.inf)
    for mask in (seen, hidden):
        model(x, keys, attn_mask=mask).sum().backward()
        assert regard.qk_clip(model, 1e3).heads == []
    model.eval()(x, keys)
    with torch.no_grad():
        model.train()(x, keys)
    assert regard.qk_clip(model, 1e3).max_logit == {}
    model(x, keys)
    assert len(regard.qk_clip(model, 1e3).heads) == 2


def test_the_largest_of_several_forwards_counts_and_nan_is_left_alone():
    model = regard.nn.MultiheadAttention(8, 2)
    regard.qk_clip(model, 1e9)
    x = torch.randn(1, 6, 8)
    tops = []
    for size in (1.0, 30.0, 2.0):
        model(size * x)
        tops.append(logits(model, size * x))
    assert torch.allclose(torch.tensor(regard.qk_clip(model, 1e9).max_logit[""]), torch.stack(tops).amax(0), rtol=1e-4)
    with torch.no_grad():
        model.q_proj.weight[:4] = math.inf
    weight = model.q_proj.weight.clone()
    model(x)
    assert [clip.head for clip in regard.qk_clip(model, 1e-3).heads] in ([], [1])
    assert torch.equal(model.q_proj.weight[:4], weight[:4])


def test_ranks_clip_by_the_largest_of_all(monkeypatch):
    model, x = regard.nn.MultiheadAttention(8, 2), torch.randn(1, 6, 8)
    model(x)
    asked = []

    def all_reduce(tops, operation, group):
        asked.append((operation, group))
        tops.copy_(torch.maximum(tops, torch.tensor([0.0, 400.0])))  # what another rank saw

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    weight = model.q_proj.weight.clone()
    (clip,) = regard.qk_clip(model, 100.0, group="mine").heads
    assert asked == [(torch.distributed.ReduceOp.MAX, "mine")]
    assert clip.head == 1 and clip.factor == 0.25
    assert torch.allclose(model.q_proj.weight[4:], 0.5 * weight[4:]) and torch.equal(
        model.q_proj.weight[:4], weight[:4]
    )


def test_a_gradient_step_after_it_goes_on():
    """High learning rate, no scale: without clipping the logits leave, with it they stay."""

    def run(clip: bool) -> float:
        torch.manual_seed(0)
        model = regard.nn.MultiheadAttention(16, 2, score="dot")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x, y = torch.randn(4, 12, 16), torch.randn(4, 12, 16)
        for _ in range(40):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if clip:
                regard.qk_clip(model, 5.0)
        return logits(model, x).max().item()

    assert run(False) > 20.0
    assert run(True) < 10.0


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: regard.qk_clip("model"), TypeError, "model"),
        (lambda: regard.qk_clip(nn.Linear(2, 2), 0.0), ValueError, "threshold"),
        (lambda: regard.qk_clip(nn.Linear(2, 2), "high"), ValueError, "threshold"),
    ],
)
def test_nonsense_is_named(call, error, word):
    with pytest.raises(error, match=word):
        call()


def test_a_model_without_attention_is_told():
    model = nn.Linear(4, 4)
    regard.qk_clip(model)
    model(torch.randn(2, 4))
    with pytest.raises(ValueError, match="no attention call"):
        regard.qk_clip(model)


def exploded(attention, **options):
    """A model whose first head has left, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), attention(**options))
    with torch.no_grad():
        layer = model[1].q_proj if hasattr(model[1], "q_proj") else model[1].inner
        (layer.weight if isinstance(layer, nn.Linear) else layer.in_proj_weight)[:4] *= 300
    return model, torch.optim.SGD(model.parameters(), lr=1e-9)


def ours(**options):
    return regard.nn.MultiheadAttention(16, 4, **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
@pytest.mark.parametrize("way", ["compiled", "compiled in place", "by a part"])
def test_forwards_that_no_hook_sees(way):
    """regard.nn is clipped all the same; of other attentions a step without a clip is an error, not a silence."""
    x = torch.randn(2, 6, 16)
    for attention in (ours, Self):
        model, optimizer = exploded(attention)
        called = {
            "compiled": lambda model=model: torch.compile(model, backend="eager"),
            "compiled in place": lambda model=model: model.compile(backend="eager") or model,
            "by a part": lambda model=model: model[1],
        }[way]()
        found = []
        for turn in range(3):
            called(x).square().mean().backward()
            optimizer.step()
            if attention is Self and turn == 1:
                with pytest.raises(ValueError, match="saw no training forward of it"):
                    regard.qk_clip(model, 50.0)
                break
            found.append(regard.qk_clip(model, 50.0).max_logit)
        if attention is Self:
            assert found == [{}]  # watching begins
        else:
            assert found[0]["1"][0] > 100.0
            assert [told["1"][0] for told in found[1:]] == pytest.approx([50.0, 50.0], rel=1e-3)
        torch._dynamo.reset()


def test_calls_under_vmap_do_not_count():
    model, _ = exploded(ours)
    values = dict(model.named_parameters())

    def loss(values, x):
        return torch.func.functional_call(model, values, (x[None],)).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.randn(2, 6, 16))
    assert regard.qk_clip(model, 50.0).max_logit == {}


def test_scores_that_do_not_grow_are_named_from_the_first_call_on():
    model, _ = exploded(ours, score="cosine")
    model(torch.randn(2, 6, 16)).sum().backward()
    for _ in range(2):
        clipped = regard.qk_clip(model, 1.0)
        assert clipped.heads == [] and "cosine" in clipped.skipped["1"]


def test_a_fixed_temperature_does_not_count():
    torch.manual_seed(0)
    model = regard.nn.MultiheadAttention(8, num_heads=2, temperature=0.1)
    x, found = torch.randn(2, 6, 8), []
    for _ in range(3):
        model(x).square().mean().backward()
        found.append(regard.qk_clip(model, threshold=1e6).max_logit[""])
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


@pytest.mark.filterwarnings("error")
def test_the_models_own_exception_comes_through():
    model, _ = exploded(ours)
    x = torch.randn(2, 6, 16)
    model(x).sum().backward()
    regard.qk_clip(model, 50.0)
    hooks = dict(model._forward_hooks)
    for wrong in (torch.randn(2, 6, 15), "text"):
        with pytest.raises((RuntimeError, TypeError)) as plain:
            copy.deepcopy(model).eval()(wrong)
        with pytest.raises(plain.type) as raised:
            model(wrong)
        assert str(raised.value) == str(plain.value) and "mutated" not in str(raised.value)
    model[0] = nn.Identity()
    with pytest.raises(ValueError, match="query must have shape"):
        model(torch.randn(2, 6, 15))
    assert intercept.ACTIVE == intercept._STACK == []
    assert dict(model._forward_hooks) == hooks and not model[1]._forward_hooks
    model(x).sum().backward()
    assert regard.qk_clip(model, 50.0).max_logit["1"]


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


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("way", [saved, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_watched_model_is_saved_and_copied(way, attention):
    model, _ = exploded(attention)
    x, layer = torch.randn(2, 6, 16), "1" if attention is ours else "1.inner"
    regard.qk_clip(model, 50.0)
    step(model, x)
    other = way(model)
    assert torch.equal(other(x), model(x))
    regard.qk_clip(other, 50.0)
    assert len(other._forward_hooks) == len(other._forward_pre_hooks) == len(other._forward_hooks_always_called) == 1
    step(other, 2 * x)
    assert regard.qk_clip(other, 50.0).max_logit[layer][0] > 50.0
    step(other, x)
    assert regard.qk_clip(other, 50.0).max_logit[layer][0] <= 50.1
    assert regard.qk_clip(model, 50.0).max_logit[layer][0] > 50.0  # the first is watched as before
    for one in (model, other, other := way(model)):
        regard.qk_clip.stop(one)
        assert not one._forward_hooks and not one._forward_pre_hooks and not one._forward_hooks_always_called


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("shape", [(0, 6, 16), (2, 0, 16)])
def test_an_empty_batch_has_no_logits(shape, attention):
    model, _ = exploded(attention)
    layer = "1" if attention is ours else "1.inner"
    regard.qk_clip(model, 50.0)
    model(torch.zeros(shape)).sum().backward()
    clipped = regard.qk_clip(model, 50.0)
    assert clipped.heads == [] and clipped.max_logit == {layer: [-math.inf] * 4}
    model(torch.randn(2, 6, 16)).sum().backward()
    model(torch.zeros(shape)).sum().backward()
    assert [clip.head for clip in regard.qk_clip(model, 50.0).heads] == [0]


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("first", ["qk_clip", "using"])
def test_beside_using_nothing_is_left_open(first, attention):
    model, _ = exploded(attention)
    x, depth = torch.randn(2, 6, 16), torch._C._len_torch_function_stack()
    if first == "qk_clip":
        regard.qk_clip(model, 50.0)
    with regard.using(model, temperature=2.0):
        regard.qk_clip(model, 50.0)
        for _ in range(2):
            step(model, x)
            with pytest.raises((RuntimeError, TypeError)):
                model("text")
            assert torch._C._len_torch_function_stack() == depth
        assert [clip.head for clip in regard.qk_clip(model, 50.0).heads] == [0]
    assert intercept.ACTIVE == intercept._STACK == intercept._OUTER == []
