"""Every way attention is called is caught, faithfully or not at all, and the model is left as it was."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from regard.health import faithful, intercept, measure
from regard.health.call import Call
from regard.health.examination import examine
from regard.health.what_if import parse


def dense(q, k, v, mask=None, scale=None, causal=False):
    """The float64 statistics of the reference for one call."""
    return regard.reference.attention(q, k, v, mask, 0.0, causal, scale, enable_gqa=True, return_stats=True)[2]


def means(report, name):
    return torch.tensor([head.statistics[name].mean for head in report.heads], dtype=torch.float64)


class Own(nn.Module):
    """A module that calls torch's function itself, sharply."""

    def __init__(self, heads=3, kv_heads=3, **options):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, heads * 4), nn.Linear(12, kv_heads * 4), nn.Linear(12, kv_heads * 4)
        self.options = options

    def project(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return 6.0 * q, k, v

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x), **self.options)


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(scale=0.3)], ids=str)
def test_a_plain_sdpa_call(options):
    module, x = Own(**options), torch.randn(2, 9, 12)
    report = examine(module, [x])
    with torch.no_grad():
        expected = dense(*module.project(x), scale=options.get("scale"), causal=options.get("is_causal", False))
    for name in ("entropy", "max_weight", "max_logit", "gradient_gain", "distance"):
        torch.testing.assert_close(means(report, name), expected[name].mean((0, 2)), rtol=1e-4, atol=1e-6)


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
def test_nested_tensors_are_told_of():
    model, y = Beside(), torch.randn(2, 20, 12)
    x = torch.nested.nested_tensor([torch.randn(5, 12), torch.randn(9, 12)], layout=torch.jagged)
    report = examine(model, [(x, y)])
    assert [name for name, _ in report.unmeasured] == ["nested"] and "nested" in report.unmeasured[0][1]
    assert {head.layer for head in report.heads} == {"plain"}
    with pytest.raises(ValueError, match="cannot lead this call: its tensors are"), regard.using(model, softcap=2.0):
        model(x, y)
    regard.qk_clip(model, 1.0)
    model(x, y)
    assert "nested" in regard.qk_clip(model, 1.0).skipped["nested"]
    regard.qk_clip.stop(model)


def flash_attn_func(q, k, v):
    """Stands for a kernel that is not caught."""
    return (q @ k.mT).softmax(-1) @ v


class Kernel(nn.Module):
    def forward(self, x):
        return flash_attn_func(x, x, x)


class Rotary(nn.Module):
    def forward(self, x):
        if x.is_cuda:
            from flash_attn.layers.rotary import apply_rotary_emb  # no attention

            return apply_rotary_emb(x)
        return x


def test_a_kernel_that_is_not_caught_is_told_of():
    model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 24), Kernel(), Rotary())
    report = examine(model, [torch.randn(2, 20, 12)])
    assert [name for name, _ in report.unmeasured] == ["1"] and "flash_attn_func" in report.unmeasured[0][1]
    with pytest.raises(ValueError, match="'0' has flash_attn_func, which is not caught"):
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


def test_long_rows_are_checked_on_samples_and_go_on_rebuilt(monkeypatch):
    module, x = Own(is_causal=True), torch.randn(1, 40, 12)
    whole = examine(module, [x])
    monkeypatch.setattr(measure, "WHOLE", 16)
    monkeypatch.setattr(faithful, "SAMPLED", 8)
    seen = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    sampled = examine(module, [x])
    torch.testing.assert_close(means(sampled, "entropy"), means(whole, "entropy"))
    torch.testing.assert_close(seen[0], module(x).detach(), rtol=1e-4, atol=1e-5)
    assert "on 8 rows" in sampled.how["faithful"]["checked"]


@pytest.mark.parametrize("long", [False, True])
def test_an_unfaithful_layer_is_silent_and_left_alone(monkeypatch, long):
    """The measured path is made wrong on purpose: the layer must lose its numbers, the model must keep its output."""
    if long:
        monkeypatch.setattr(measure, "WHOLE", 4)
    module, x = nn.Sequential(Own()), torch.randn(1, 9, 12)
    own = module(x)
    right = regard.attention
    monkeypatch.setattr(regard, "attention", lambda q, k, v, **options: right(1.05 * q, k, v, **options))
    seen = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    report = examine(module, [x])
    assert report.heads == []
    assert report.findings == []
    ((layer, reason),) = report.unmeasured
    assert layer == "0"
    assert "differs by" in reason
    assert len(seen) == (2 if long else 1)  # what went on rebuilt and was wrong is run again
    torch.testing.assert_close(seen[-1], own, rtol=0, atol=0)


def test_nan_is_not_measured():
    report = examine(nn.Sequential(Own()), [torch.full((1, 9, 12), math.nan)])
    assert report.heads == []
    assert "not finite" in report.unmeasured[0][1]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(Own(), nn.Dropout(0.5))
    model.train()
    model[1].eval()
    examine(model, [torch.randn(1, 5, 12)])
    assert model.training
    assert not model[1].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert intercept.ACTIVE == []
    assert F.scaled_dot_product_attention is intercept.SDPA


def test_an_error_midway_keeps_what_was_measured():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Own(), Own()

        def forward(self, x):
            out = self.a(x)
            if x.shape[1] > 6:
                raise RuntimeError("no more than six tokens")
            return out + self.b(x)

    model = Fragile()
    report = examine(model, [torch.randn(1, 5, 12), torch.randn(1, 8, 12)])
    assert "no more than six tokens" in report.interrupted
    assert "after 1 whole" in report.interrupted
    assert {head.layer: head.statistics["entropy"].count for head in report.heads} == {"a": 13, "b": 5}
    assert intercept.ACTIVE == []
    with pytest.raises(RuntimeError, match="six tokens"):
        examine(nn.Sequential(nn.Identity(), _Failing()), [torch.randn(1, 8, 12)])


class _Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError("no more than six tokens")


def test_control_c_keeps_what_was_measured():
    def batches():
        yield torch.randn(1, 5, 12)
        raise KeyboardInterrupt

    report = examine(Own(), batches())
    assert report.interrupted.startswith("KeyboardInterrupt")
    assert len(report.heads) == 3


@pytest.mark.parametrize(
    ("model", "batches", "error", "match"),
    [
        (nn.Linear(3, 3), [torch.randn(2, 3)], ValueError, "no attention was found in Linear"),
        (Own(), [], ValueError, "batches is empty"),
        (Own(), 7, TypeError, "batches must be an iterable"),
        (Own(), "a text", TypeError, "got text; tokenize it"),
        ("model", [], TypeError, "model must be a torch.nn.Module"),
    ],
)
def test_bad_input_is_told(model, batches, error, match):
    with pytest.raises(error, match=match):
        examine(model, batches)


def test_a_bad_what_if_is_told_before_any_work():
    for what_if, error, words in (
        (["temprature=2"], ValueError, "did you mean 'temperature=2'"),
        ("temperature", ValueError, "did you mean 'temperature=2'"),
        ("sparsemax", ValueError, "did you mean 'normalizer=sparsemax'"),
        ("entmax15", ValueError, "did you mean 'normalizer=entmax15'"),
        (["softcap=-1"], ValueError, "positive number"),
        (None, TypeError, "what_if must be strings such as 'temperature=2', got NoneType"),
        (5, TypeError, "got int"),
        ([["qk_norm"]], TypeError, "what_if must hold strings such as 'temperature=2', got list"),
    ):
        with pytest.raises(error, match=words):
            examine(Own(), [torch.randn(1, 5, 12)], what_if=what_if)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssmax+temperature=2", "sets temperature twice, for ssmax is one"),
        ("temperature=2+ssmax", "sets temperature twice"),
        ("temperature=2+temperature=3", "sets temperature twice"),
        ("scale=sqrt+qk_norm+scale=2", "sets scale twice"),
        ("qk_norm+qk_norm", "sets qk_norm twice"),
    ],
)
def test_a_what_if_that_says_one_thing_twice_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_the_parts_of_a_what_if_stand_in_any_order():
    call = Call(Own(), *torch.randn(3, 1, 2, 5, 8), own=lambda rows: torch.zeros(()), kind="sdpa")
    one, other, alone = (parse(text)(call) for text in ("qk_norm+scale = 0.5", "scale=0.5 + qk_norm", "qk_norm"))
    assert one.options == other.options == dict(scale=0.5)
    assert alone.options == dict(scale=None)
    for changed in (one, other, alone):
        torch.testing.assert_close(changed.q.square().mean(-1), torch.ones(1, 2, 5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("temperature=2", dict(temperature=2.0)),
        ("scale=inverse", dict(scale="inverse")),
        ("softcap=1.5", dict(softcap=1.5)),
        ("normalizer=entmax15", dict(normalizer="entmax15")),
        ("normalizer=entmax(alpha=1.25)", dict(normalizer="entmax(alpha=1.25)")),
        ("scale=none+temperature=3", dict(scale="none", temperature=3.0)),
        ("temperature=2e+0+normalizer=sigmoid(bias=+1)", dict(temperature=2.0, normalizer="sigmoid(bias=1)")),
    ],
)
def test_what_if_is_the_reference_under_the_change(change, options):
    module, x = Own(is_causal=True), torch.randn(2, 9, 12)
    report = examine(module, [x], what_if=change)
    with torch.no_grad():
        expected = regard.reference.attention(*module.project(x), is_causal=True, **options, return_stats=True)[2]
    for name in ("entropy", "max_weight", "max_logit"):
        torch.testing.assert_close(
            means(report.what_if[change], name), expected[name].mean((0, 2)), rtol=1e-4, atol=1e-6
        )
    plain = examine(module, [x])
    torch.testing.assert_close(means(report, "entropy"), means(plain, "entropy"))  # the model itself was not changed


def test_what_if_qk_norm_and_ssmax():
    module, x = Own(), torch.randn(2, 9, 12)
    report = examine(module, [x], what_if=["qk_norm", "ssmax"])
    assert max(head.statistics["max_logit"].max for head in report.what_if["qk_norm"].heads) <= 2.0 + 1e-5  # √d·cos
    n = torch.tensor(9.0)
    with torch.no_grad():
        q, k, v = module.project(x)
        expected = dense(q * 0.43 * n.log(), k, v)
    torch.testing.assert_close(
        means(report.what_if["ssmax"], "entropy"), expected.entropy.mean((0, 2)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own TorchScript
def test_torchscript_is_told_by_its_name():
    model = torch.jit.trace(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(TypeError, match="model is TorchScript"):
        examine(model, [torch.randn(2, 3)])
