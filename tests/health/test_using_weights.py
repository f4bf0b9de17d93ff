"""`regard.using` on models that call torch's MultiheadAttention with its defaults, and so ask for its weights."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import regard
from regard.health.capture.interception import Interception

CHANGES = {
    "entmax15": dict(normalizer="entmax15"),
    "softpick": dict(normalizer="softpick"),
    "number": dict(temperature=0.3),
    "per head": dict(temperature=torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None, None]),
    "ssmax": dict(temperature=regard.temperature.SSMax(0.7)),
    "adaptive": dict(temperature="adaptive"),
    "scale": dict(scale=torch.tensor([0.1, 1.0, 2.0, 0.5])),
    "softcap": dict(softcap=1.5, temperature=0.5),
    "qk_norm": dict(qk_norm=True, normalizer="sigmoid"),
}


def sharp(**options) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(32, 4, **options)
    with torch.no_grad():
        module.in_proj_weight.mul_(3.0)
    return module


def reference(module: nn.MultiheadAttention, x, mask, **changes):
    """(o, p per head) in float64 of x [B, N, 32], by the formula."""
    q, k, v = nn.functional.linear(x.double(), module.in_proj_weight.double(), module.in_proj_bias.double()).chunk(
        3, -1
    )
    q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (q, k, v))
    if changes.pop("qk_norm", False):
        q, k = regard.nn.qk_norm(q, k)
    if changes.get("temperature") == "adaptive":
        changes["temperature"] = regard.temperature.named.unsized("adaptive")
    o, p = regard.reference.attention(q, k, v, mask, **changes)
    out = module.out_proj
    return nn.functional.linear(o.transpose(1, 2).flatten(2), out.weight.double(), out.bias.double()), p


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_weights_are_those_of_the_formula_and_so_are_gradients(changes, masked):
    module, x = sharp(batch_first=True), torch.randn(2, 9, 32, requires_grad=True)
    hide = ~torch.ones(9, 9, dtype=torch.bool).tril()
    mask = torch.randn(9, 9).masked_fill(hide, -math.inf) if masked else None
    given = dict(attn_mask=mask, is_causal=masked)  # of which torch believes the mask
    with regard.using(module, **changes) as swap:
        out, average = module(x, x, x, **given)
        heads = module(x, x, x, average_attn_weights=False, **given)[1]
        plain = module(x, x, x, need_weights=False, attn_mask=mask)
    assert swap.calls == 3 and plain[1] is None
    want, p = reference(module, x, mask, **changes)
    torch.testing.assert_close(heads.double(), p, rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(average.double(), p.mean(1), rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(out.double(), want, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(out, plain[0], rtol=2e-4, atol=1e-5)
    pull, across = torch.randn(2, 9, 32), torch.randn(2, 9, 9)
    ours = torch.autograd.grad((out * pull).sum() + (average * across).sum(), (x, module.in_proj_weight))
    theirs = torch.autograd.grad((want * pull).sum() + (p.mean(1) * across).sum(), (x, module.in_proj_weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("form", ["batched", "batch first", "unbatched", "one head", "cross", "extra keys", "padded"])
@pytest.mark.parametrize("training", [True, False])
def test_softmax_is_torchs_own_shapes_dropout_and_all(form, average, training):
    options = {"batch first": dict(batch_first=True), "extra keys": dict(add_bias_kv=True, add_zero_attn=True)}
    heads = 1 if form == "one head" else 4
    module = nn.MultiheadAttention(32, heads, dropout=0.4, **options.get(form, {})).train(training)
    x = torch.randn(*((6, 32) if form == "unbatched" else (6, 3, 32)), requires_grad=True)
    key = torch.randn(8, 3, 32) if form == "cross" else x
    given = dict(average_attn_weights=average)
    if form == "padded":
        given["key_padding_mask"] = torch.arange(6) >= torch.tensor([6, 4, 5])[:, None]
        given.update(attn_mask=~torch.ones(6, 6, dtype=torch.bool).tril(), is_causal=True)

    def run():
        torch.manual_seed(3)
        out, weights = module(x, key, key, **given)
        return out, weights, torch.autograd.grad(out.square().sum() + weights.square().sum(), x)[0]

    own = run()
    with regard.using(module, normalizer="softmax"):
        ours = run()
    for one, other in zip(ours, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_sixteen_bits_have_torchs_dtypes(mixed):
    module, x = sharp(batch_first=True).eval(), torch.randn(2, 9, 32)
    if not mixed:
        module, x = module.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        own = module(x, x, x)
        with regard.using(module, normalizer="softmax"):
            ours = module(x, x, x)
    for one, other in zip(ours, own, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.03)


def test_a_row_that_sees_nothing_weighs_nothing_and_hidden_nan_stays_hidden():
    module, x = sharp(batch_first=True).eval(), torch.randn(2, 5, 32)
    x[1, 4] = math.nan
    hidden = torch.tensor([[True] * 5, [False] * 4 + [True]])
    with regard.using(module, temperature=2.0):
        out, weights = module(x[:, :4], x, x, key_padding_mask=hidden)
    assert (weights[0] == 0).all() and (weights[..., 4] == 0).all()
    torch.testing.assert_close(out[0], module.out_proj.bias.expand(4, 32))
    assert out.isfinite().all()


def test_what_is_recommended_can_be_put_in_and_examined():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = sharp(batch_first=True, dropout=0.1)

        def forward(self, x):
            y, _ = self.attn(x, x, x)
            return x + y

    model, x = Block(), torch.randn(2, 9, 32)
    want = regard.examine(model, [x], what_if=["temperature=4"])
    with regard.using(model, temperature=4.0):
        report = regard.examine(model, [x])
    assert [head.layer for head in report.heads] == ["attn"] * 4
    told = torch.tensor([head.statistics["entropy"].mean for head in report.heads])
    expected = torch.tensor([head.statistics["entropy"].mean for head in want.what_if["temperature=4"].heads])
    torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-6)


def test_a_swap_that_leaves_the_call_alone_gives_torchs_own():
    module, x = sharp(batch_first=True).eval(), torch.randn(2, 5, 32)
    own = module(x, x, x)
    with Interception(module, swap=lambda call: call, in_every_forward=True):
        ours = module(x, x, x)
    torch.testing.assert_close(ours, own)


def test_ranks_that_share_a_sequence_have_no_whole_weights_and_say_so():
    module, x = sharp(batch_first=True).eval(), torch.randn(2, 5, 32)
    with regard.using(module, scale=1.0) as swap:
        swap._shards = SimpleNamespace(stop=lambda: None)
        with pytest.raises(ValueError, match=r"context_parallel: .* need_weights=False"):
            module(x, x, x)
    assert module(x, x, x)[1].shape == (2, 5, 5)


@pytest.mark.parametrize("asked", ["by the caller", "by the configuration"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_oss"])  # GPT-2 tells its attention nothing; gpt-oss has sinks
def test_an_eager_model_of_transformers_gets_the_weights_that_were_used(kind, asked):
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    if kind != "gpt2":
        sizes |= dict(intermediate_size=16, num_key_value_heads=2, head_dim=4)
    if kind == "gpt_oss":
        sizes |= dict(num_local_experts=2, num_experts_per_tok=1)
    config = AutoConfig.for_model(kind, **sizes, vocab_size=20, attn_implementation="eager")
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    model.config.output_attentions = asked == "by the configuration"
    ids, wish = torch.randint(20, (2, 12)), {"output_attentions": True} if asked == "by the caller" else {}
    with torch.no_grad():
        (own,) = model(ids, **wish).attentions
        with regard.using(model, temperature=1.0):
            (same,) = model(ids, **wish).attentions
        with regard.using(model, normalizer="sparsemax", temperature=0.01):
            (sparse,) = model(ids, **wish).attentions
    torch.testing.assert_close(same, own)
    torch.testing.assert_close(sparse.sum(-1), torch.ones(2, 4, 12))
    assert (sparse == 0).sum() > (own == 0).sum()
