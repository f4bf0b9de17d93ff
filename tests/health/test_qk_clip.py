"""regard.qk_clip: after an ordinary step, every head's largest logit is at most the threshold, the others untouched."""

import copy
import math

import pytest
import torch
from qk_clip_data import Self, exploded, logits, ours, step
from torch import nn

import regard
from regard.health.capture import interception
from regard.nn.projections import NotFound, projections


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
    assert interception.ACTIVE == []


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 16}, {"bias": False}])
def test_torchs_module_from_its_second_step(options):
    torch.manual_seed(0)
    model, x = Self(**options), torch.randn(2, 7, 16)
    with torch.no_grad():
        query = model.inner.in_proj_weight if model.inner.in_proj_weight is not None else model.inner.q_proj_weight
        query[4:8] *= 1e3
        if model.inner.in_proj_bias is not None:
            nn.init.normal_(model.inner.in_proj_bias)
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


def test_scores_that_do_not_grow_are_named_from_the_first_call_on():
    model, _ = exploded(ours, score="cosine")
    model(torch.randn(2, 6, 16)).sum().backward()
    for _ in range(2):
        clipped = regard.qk_clip(model, 1.0)
        assert clipped.heads == [] and "cosine" in clipped.skipped["1"]


class Separate(nn.Module):
    """Attention whose query and key layers have these names."""

    def __init__(self, query: str, key: str) -> None:
        super().__init__()
        self.names, self.values = (query, key), nn.Linear(32, 32)
        for name in self.names:
            setattr(self, name, nn.Linear(32, 32))

    def forward(self, x):
        layers = (*(getattr(self, name) for name in self.names), self.values)
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in layers)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_layers_of_unusual_names_are_clipped_if_they_are_named():
    torch.manual_seed(0)
    model, x = Separate("ask", "answer").train(), torch.randn(4, 16, 32)
    regard.qk_clip(model, threshold=0.5)
    model(x)
    assert "no linear layers named" in regard.qk_clip(model, threshold=0.5).skipped[""]
    model(x)
    clipped = regard.qk_clip(model, threshold=0.5, names=("ask", "answer"))
    assert clipped.skipped == {} and len(clipped.heads) == 4
    model(x)
    assert max(regard.qk_clip(model, threshold=9.0).max_logit[""]) == pytest.approx(0.5, rel=1e-4)
    regard.qk_clip.stop(model)


@pytest.mark.parametrize("frozen", ["q", "k"])
def test_the_side_that_may_change_follows_by_itself(frozen):
    torch.manual_seed(0)
    model = Separate("q", "k").train()
    getattr(model, frozen).requires_grad_(False)
    x = torch.randn(4, 32, 32)
    for _ in range(6):
        with torch.no_grad():
            (model.k if frozen == "q" else model.q).weight.mul_(4.0)  # by hand, after a clip
        model(x)
        clipped = regard.qk_clip(model, threshold=0.5)
    regard.qk_clip.stop(model)
    assert clipped.skipped == {} and len(clipped.heads) == 4
