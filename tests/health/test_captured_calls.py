"""Every way in which attention is called is measured as the reference computes it, or reported as unmeasured."""

import math

import pytest
import score_functions
import torch
import torch.nn.functional as F
from health_subject import Own, dense, means
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from regard.health.examine import examine


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(scale=0.3)], ids=str)
def test_a_plain_sdpa_call(options):
    module, x = Own(**options), torch.randn(2, 9, 12)
    report = examine(module, [x])
    with torch.no_grad():
        expected = dense(*module.project(x), scale=options.get("scale"), causal=options.get("is_causal", False))
    for name in ("entropy", "max_weight", "max_logit", "gradient_gain", "distance"):
        torch.testing.assert_close(means(report, name), expected[name].mean((0, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "policy", ["adaptive", lambda _, rows: 0.2 + rows(("mass",))["mass"]], ids=["module", "function"]
)
def test_what_a_temperature_policy_measures_is_no_layer(policy):
    """Its pass at T = 1 has weights that the model never uses."""
    model, x = regard.nn.MultiheadAttention(12, 3, normalizer="entmax15", temperature=policy), torch.randn(2, 9, 12)
    report = examine(model, [x])
    assert [(head.layer, head.index, head.head) for head in report.heads] == [("", 0, head) for head in range(3)]
    with torch.no_grad():
        used = model(x, return_stats=True)[1]
    torch.testing.assert_close(means(report, "entropy"), used.entropy.mean((0, 2)).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(normalizer="entmax(alpha=1.002)", is_causal=True),
        dict(backend="reference", softcap=2.0, sink=torch.ones(3), window=(4, 1)),
        dict(backend="reference", score_mod=score_functions.CLAMP),
        dict(normalizer="entmax(alpha=1.001)", temperature=regard.temperature.Adaptive(), return_stats=("mass",)),
    ],
    ids=lambda options: "-".join(options),
)
def test_a_call_that_takes_the_reference(options):
    class Dense(Own):
        def forward(self, x):
            result = regard.attention(*self.project(x), **self.options)
            return result[0] if isinstance(result, tuple) else result

    module, x = Dense(**options), torch.randn(2, 9, 12)
    report = examine(module, [x])
    with torch.no_grad():
        expected = regard.attention(*module.project(x), **{**options, "return_stats": True})[1]
    assert not report.unmeasured and len(report.heads) == 3
    torch.testing.assert_close(means(report, "entropy"), expected.entropy.mean((0, 2)).double(), rtol=1e-4, atol=1e-6)
    if "is_causal" in options:
        with regard.using(module, normalizer="sparsemax"):
            torch.testing.assert_close(
                module(x), regard.attention(*module.project(x), is_causal=True, normalizer="sparsemax")
            )


@pytest.mark.parametrize("params", [(-1.0, 2.0), (torch.tensor([-1.0, -0.5, 0.0]), 0.3)], ids=["numbers", "heads"])
def test_a_fused_call_with_a_score_function(params):
    class Modified(Own):
        def forward(self, x):
            return regard.attention(*self.project(x), **self.options)

    module, x = Modified(is_causal=True, score_mod=score_functions.CLAMP.with_params(*params)), torch.randn(2, 9, 12)
    report = examine(module, [x])
    with torch.no_grad():
        expected = regard.attention(*module.project(x), **module.options, return_stats=True)[1]
    assert not report.unmeasured
    for name in ("entropy", "max_logit"):
        truth = expected[name].mean((0, 2)).double()
        torch.testing.assert_close(means(report, name), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("additive", [False, True])
def test_rows_that_see_nothing_are_not_counted_in_regards_own_plain_call(additive):
    mask = torch.rand(2, 1, 9, 9) > 0.4
    mask[:, :, 0] = True  # a key that nobody sees would pass for padding
    mask[0, :, 2:5] = False
    given = torch.zeros(2, 1, 9, 9).masked_fill(~mask, -math.inf) if additive else mask

    class Plain(Own):
        def forward(self, x):
            return regard.attention(*self.project(x), given)

    module, x = Plain(), torch.randn(2, 9, 12)
    report = examine(module, x)
    with torch.no_grad():
        expected = dense(*module.project(x), given)
        torch.testing.assert_close(module(x)[0, :, 2:5], torch.zeros(3, 3, 4))
    seen = expected.visible_keys > 0
    for name in ("entropy", "max_weight", "visible_keys"):
        mean = (expected[name].where(seen, 0.0)).sum((0, 2)) / seen.sum((0, 2))
        torch.testing.assert_close(means(report, name), mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("length", [20, 300])
def test_torchs_own_causal_masks_that_hold_no_numbers(make, length):
    torch.manual_seed(0)
    model, x = Own().eval(), torch.randn(2, length, 12)
    model.forward = lambda x: F.scaled_dot_product_attention(
        *(each[:, :, length - 12 if side == 0 else 0 :] for side, each in enumerate(model.project(x))),
        attn_mask=make(12, length),
    )
    q, k, v = model.project(x)
    shown = torch.ones(12, length, dtype=torch.bool).tril(length - 12 if make is causal_lower_right else 0)
    report = examine(model, [x])
    assert report.unmeasured == []
    want = dense(q[:, :, length - 12 :], k, v, shown)
    for name in ("entropy", "visible_keys", "max_logit"):
        torch.testing.assert_close(means(report, name), want[name].mean((0, 2)), rtol=1e-4, atol=1e-5)
    plain = model(x)
    with regard.using(model, temperature=1.0):
        torch.testing.assert_close(model(x), plain)
    model.train()
    regard.qk_clip(model, 0.1)
    model(x)
    found = regard.qk_clip(model, 0.1)
    regard.qk_clip.stop(model)
    torch.testing.assert_close(found.max_logit[""], want.max_logit.amax((0, 2)).tolist(), rtol=1e-4, atol=1e-4)


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.nested, self.plain = Own(), Own()

    def forward(self, x, y):
        return self.nested(x), self.plain(y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_reported():
    model, y = Beside(), torch.randn(2, 20, 12)
    x = torch.nested.nested_tensor([torch.randn(5, 12), torch.randn(9, 12)], layout=torch.jagged)
    report = examine(model, [(x, y)])
    assert [name for name, _ in report.unmeasured] == ["nested"] and "nested" in report.unmeasured[0][1]
    assert {head.layer for head in report.heads} == {"plain"}
    with pytest.raises(ValueError, match="cannot intercept this call: its tensors"), regard.using(model, softcap=2.0):
        model(x, y)
    regard.qk_clip(model, 1.0)
    model(x, y)
    assert "nested" in regard.qk_clip(model, 1.0).skipped["nested"]
    regard.qk_clip.stop(model)


def flash_attn_func(q, k, v):
    """Stands for a kernel that is not caught: another module's function of this name, in another language."""
    return v.detach().numpy() @ torch.eye(v.shape[-1]).numpy()


class Kernel(nn.Module):
    def forward(self, x):
        return torch.as_tensor(flash_attn_func(x, x, x))


class Rotary(nn.Module):
    def forward(self, x):
        if x.is_cuda:
            from flash_attn.layers.rotary import apply_rotary_emb  # no attention

            return apply_rotary_emb(x)
        return x


def test_a_kernel_that_is_not_captured_is_reported():
    model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 24), Kernel(), Rotary())
    report = examine(model, [torch.randn(2, 20, 12)])
    assert [name for name, _ in report.unmeasured] == ["1"] and "flash_attn_func" in report.unmeasured[0][1]
    with pytest.raises(ValueError, match="'0' has flash_attn_func, which is not captured"):
        examine(nn.Sequential(Kernel()), [torch.randn(2, 20, 12)])


def test_grouped_queries_and_masks():
    mask = torch.rand(9, 9) > 0.4
    mask.fill_diagonal_(True)
    module, x = Own(heads=4, kv_heads=2, enable_gqa=True, attn_mask=mask), torch.randn(2, 9, 12)
    report = examine(module, x)
    with torch.no_grad():
        expected = dense(*module.project(x), mask)
    torch.testing.assert_close(means(report, "entropy"), expected.entropy.mean((0, 2)), rtol=1e-4, atol=1e-6)
    assert len(report.heads) == 4


def test_three_dims_are_a_batch_of_single_heads():
    class Single(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(4 * x, x, x)

    x = torch.randn(5, 7, 8)
    report = examine(nn.Sequential(Single()), [x])
    assert [(head.layer, head.head) for head in report.heads] == [("0", 0)]
    expected = dense(4 * x[:, None], x[:, None], x[:, None])
    torch.testing.assert_close(means(report, "entropy"), expected.entropy.mean((0, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_with_padding(weights):
    module = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    with torch.no_grad():
        module.in_proj_weight.mul_(4.0)
    x, hidden = torch.randn(3, 8, 12), torch.arange(8) >= torch.tensor([8, 5, 6])[:, None]
    own, dense_weights = module(x, x, x, key_padding_mask=hidden, average_attn_weights=False)

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.multihead_attn = module

        def forward(self, x):
            return self.multihead_attn(
                x, x, x, key_padding_mask=hidden, need_weights=weights, average_attn_weights=False
            )

    seen = []
    holder = Holder()
    holder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    report = examine(holder, [x])
    assert [head.layer for head in report.heads] == ["multihead_attn"] * 3
    entropy = regard.statistics.of_weights(dense_weights.double()).entropy  # [B, H, M]
    expected = torch.stack([entropy[:, head][~hidden].mean() for head in range(3)])
    torch.testing.assert_close(means(report, "entropy"), expected, rtol=1e-4, atol=1e-6)
    assert report.heads[0].statistics["entropy"].count == int((~hidden).sum())
    torch.testing.assert_close(seen[0][0][~hidden], own[~hidden], rtol=1e-5, atol=1e-5)
    assert (seen[0][1] is not None) == weights


def test_transformer_layers_and_cross_attention():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    report = examine(model, [(torch.randn(2, 7, 16), torch.randn(2, 5, 16))])
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert [(head.layer, head.index) for head in report.heads[::2]] == list(zip(names, range(3), strict=True))
    assert report.heads[-1].statistics["visible_keys"].mean == 7
    assert report.unmeasured == []
    assert torch.backends.mha.get_fastpath_enabled()


def test_padding_rows_of_a_decoder_do_not_count_in_cross_attention():
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
    hidden = torch.arange(6) >= torch.tensor([6, 4])[:, None]
    for length in (9, 6):
        batch = dict(tgt=torch.randn(2, 6, 16), memory=torch.randn(2, length, 16), tgt_key_padding_mask=hidden)
        batch["memory_key_padding_mask"] = torch.arange(length) >= torch.tensor([3, length])[:, None]
        report = examine(layer, [batch])
        assert [head.statistics["entropy"].count for head in report.heads] == [10] * 4
        assert report.heads[-1].statistics["visible_keys"].mean == pytest.approx((6 * 3 + 4 * length) / 10)


def test_regards_own_attention_is_measured_as_it_is():
    class Sparse(nn.Module):
        def forward(self, x):
            return regard.attention(3 * x, x, x, is_causal=True, normalizer="sparsemax", temperature=0.5, softcap=4.0)

    x = torch.randn(1, 2, 10, 8)
    report = examine(nn.Sequential(Sparse()), [x])
    expected = regard.reference.attention(
        3 * x, x, x, is_causal=True, normalizer="sparsemax", temperature=0.5, softcap=4.0, return_stats=True
    )[2]
    torch.testing.assert_close(means(report, "support"), expected.support.mean((0, 2)))
    torch.testing.assert_close(means(report, "entropy"), expected.entropy.mean((0, 2)), rtol=1e-4, atol=1e-6)


def test_masks_of_minus_a_billion_hide():
    class Old(nn.Module):
        def forward(self, x):
            mask = torch.zeros(2, 1, 1, 6)
            mask[1, ..., 4:] = -1e9
            return F.scaled_dot_product_attention(x, x, x, mask)

    report = examine(nn.Sequential(Old()), [torch.randn(2, 2, 6, 4)])
    assert report.heads[0].statistics["visible_keys"].max == 6
    assert report.heads[0].statistics["entropy"].count == 10


def test_a_module_used_twice_is_two_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = Own()

        def forward(self, x):
            return self.shared(x) + self.shared(2 * x)

    report = examine(Twice(), [torch.randn(1, 6, 12)] * 2)
    assert [(head.layer, head.index) for head in report.heads] == [("shared", 0)] * 3 + [("shared", 1)] * 3
    assert report.heads[0].statistics["entropy"].count == 12
