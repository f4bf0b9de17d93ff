"""regard.using: another normaliser inside a real model, and the model back to the bit."""

import contextlib
import sys

import pytest
import torch
from torch import nn

import regard
from regard.health.capture import interception


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()


def test_a_model_computes_with_the_normaliser_it_is_given():
    class Plain(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(3 * x, x, x, is_causal=True)

    model, x = Plain(), torch.randn(2, 2, 9, 4)
    own = model(x)
    with regard.using(model, normalizer="entmax15", temperature=0.5) as swap:
        other = model(x)
    expected = regard.reference.attention(3 * x, x, x, is_causal=True, normalizer="entmax15", temperature=0.5)[0]
    torch.testing.assert_close(other, expected.float(), rtol=1e-4, atol=1e-5)
    assert repr(swap) == "using(normalizer='entmax15', temperature=0.5): 1 calls so far, restored"
    assert swap.calls == 1
    assert torch.equal(model(x), own)


def test_policies_and_examination_inside():
    model, x = encoder(), torch.randn(1, 12, 16)
    with regard.using(model, normalizer="sparsemax", temperature=regard.temperature.SSMax()):
        report = regard.examine(model, [x])
    assert report.unmeasured == []
    assert min(head.statistics["support"].mean for head in report.heads) < 12  # what was used, not softmax


def test_qk_norm_is_what_its_what_if_told():
    class Scaled(nn.Module):
        """Multiplies its queries itself, as OPT, BART and Whisper do."""

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x / 8**0.5, x, x, scale=1.0)

    model, x = Scaled(), torch.randn(2, 2, 9, 8)
    told = regard.examine(model, [x], what_if=["qk_norm"]).what_if["qk_norm"].heads
    with regard.using(model, qk_norm=True):
        used, output = regard.examine(model, [x]).heads, model(x)
    assert [head.to_json()["statistics"] for head in used] == [head.to_json()["statistics"] for head in told]
    q, k = regard.nn.qk_norm(x, x)
    torch.testing.assert_close(output, regard.attention(q, k, x))
    with regard.using(model, qk_norm=True, scale=0.1):
        torch.testing.assert_close(model(x), regard.attention(q, k, x, scale=0.1))


def test_for_good_and_back():
    model, x = encoder(), torch.randn(1, 7, 16)
    own, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    swap = regard.using(model, scale="none")
    assert not torch.equal(model(x), own)
    swap.restore()
    swap.restore()
    assert torch.equal(model(x), own)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert interception.ACTIVE == []


def test_gradients_flow_through_it():
    model, x = encoder().train(), torch.randn(1, 7, 16)
    with regard.using(model, normalizer="entmax15"):
        model(x).square().mean().backward()
    grads = [p.grad for name, p in model.named_parameters() if "in_proj_weight" in name]
    assert all(grad is not None and grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)


def test_an_error_inside_leaves_nothing_behind():
    model = encoder()
    with pytest.raises(AssertionError), regard.using(model, normalizer="softmax1"):
        model(torch.randn(1, 7, 5))
    assert torch.backends.mha.get_fastpath_enabled()
    assert interception.ACTIVE == []
    model(torch.randn(1, 7, 16))


def test_huggingface_with_padding_and_checkpointing():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids, mask = torch.randint(1, 60, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids)
    own = model(**batch).logits
    with regard.using(model, normalizer="softmax", temperature=1.0):  # the same distribution by another road
        torch.testing.assert_close(model(**batch).logits[mask.bool()], own[mask.bool()], rtol=1e-4, atol=1e-4)
    grads = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        with regard.using(model.train(), normalizer="entmax15"):
            model.zero_grad()
            model(**batch).loss.backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "changes nothing"),
        (dict(temperature=-1), ValueError, "temperature must be a positive"),
        (dict(temperature=True), ValueError, "temperature must be a positive"),
        (dict(softcap=float("nan")), ValueError, "softcap must be a positive"),
        (dict(softcap=True), ValueError, "softcap must be a positive number or None, got True"),
        (dict(softcap="50"), ValueError, "softcap must be a positive number or None, got '50'"),
        (dict(qk_norm=50.0), TypeError, r"qk_norm must be True or False, got 50\.0; softcap="),
        (dict(soft_cap=30.0), TypeError, "using has no argument 'soft_cap'; it is called 'softcap' here"),
        (dict(mask=None), TypeError, "unexpected keyword argument 'mask'"),
        (dict(normalizer="entmacks"), ValueError, "entmax"),
        (dict(scale="square"), ValueError, "scale 'square'"),
    ],
)
def test_bad_options_are_reported_and_change_nothing(options, error, match):
    with pytest.raises(error, match=match):
        regard.using(encoder(), **options)
    assert interception.ACTIVE == []


@pytest.mark.parametrize("is_flex_imported", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("given", ["as written", "compiled"])
def test_what_was_compiled_is_changed_too(given, before, is_flex_imported, monkeypatch):
    """Whatever was imported, and whether the compiled model ran before the block or not."""
    import torch.nn.attention.flex_attention

    if not is_flex_imported:
        monkeypatch.delitem(sys.modules, "torch.nn.attention.flex_attention")
    model, x = encoder(), torch.randn(1, 7, 16)
    own, compiled = model(x), torch.compile(model, backend="eager", fullgraph=True)
    if before:
        compiled(x)
    with regard.using(model, temperature=5.0):
        changed = model(x)
    says = pytest.warns(UserWarning, match="as it was written") if given == "compiled" else contextlib.nullcontext()
    with says:
        outer = regard.using(model if given == "as written" else compiled, temperature=5.0)
    with outer:
        torch.testing.assert_close(compiled(x), changed)
        with regard.using(model, temperature=2.0):  # an inner block that ends does not end the rule
            compiled(x)
        torch.testing.assert_close(compiled(x), changed)
    assert not torch.allclose(changed, own) and outer.calls
    torch.testing.assert_close(compiled(x), own)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch._dynamo.reset()


@pytest.mark.parametrize("before", [True, False])
def test_what_was_compiled_runs_as_it_was_written_while_it_is_examined(before):
    model, x = encoder(), torch.randn(1, 7, 16)
    own, compiled = model(x), torch.compile(model, backend="eager", fullgraph=True)
    if before:
        compiled(x)
    report = regard.examine(model, [lambda _: compiled(x)])
    assert report.heads and not report.unmeasured
    torch.testing.assert_close(compiled(x), own)
    assert interception.ACTIVE == interception.STATE.scopes == interception.STATE.stack == []
    torch._dynamo.reset()


class Viewed(nn.Module):
    """Takes a view of torch's output, which torch lays out so that it can."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).split(16, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).view(x.shape)


def test_outputs_lie_in_memory_as_those_of_torch():
    model, x = Viewed(), torch.randn(2, 300, 16)
    with regard.using(model, normalizer="entmax15"):
        model(x).sum().backward()
    report = regard.examine(nn.Sequential(model), [x])  # beyond 256 queries it goes on with the rebuilt output
    assert report.interrupted is None and len(report.heads) == 2


def test_copies_and_pickles_lose_the_change_loudly(tmp_path):
    import copy
    import pickle

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    x = torch.randn(1, 7, 16)
    own = layer(x)
    with regard.using(layer, normalizer="sparsemax", temperature=0.1):
        with pytest.warns(UserWarning, match=r"does not have what regard\.using changed"):
            twin = copy.deepcopy(layer)
        with pytest.warns(UserWarning, match=r"does not have what regard\.using changed"):
            saved = pickle.dumps(layer)
        changed = layer(x)
    assert bool((changed != own).any())
    for other in (twin, pickle.loads(saved)):
        torch.testing.assert_close(other(x), own)
    copy.deepcopy(layer)  # restored: no warning
