"""What torch's and entmax's own suites ask of `attention` and of rows."""

import pytest
import torch
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import regard


def qkv(queries=8, keys=8):
    return torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4), torch.randn(1, 2, keys, 4)


class Causal(torch.nn.Module):
    def __init__(self, normalizer):
        super().__init__()
        self.normalizer = normalizer

    def forward(self, q, k, v):
        return regard.attention(q, k, v, is_causal=True, normalizer=self.normalizer)


@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_exported_causal_order_takes_more_keys_or_fewer(normalizer):
    m, n = Dim("m", min=2, max=512), Dim("n", min=2, max=512)
    model = Causal(normalizer)
    exported = export(model, qkv(20, 30), dynamic_shapes=dict(q={2: m}, k={2: n}, v={2: n})).module()
    for queries, keys in ((5, 9), (9, 5), (20, 30), (30, 20)):
        given = qkv(queries, keys)
        torch.testing.assert_close(exported(*given), model(*given))


def test_gradients_by_torch_func_through_additive_scores():
    layer, x = regard.nn.MultiheadAttention(8, num_heads=2, score="additive"), torch.randn(1, 5, 8)
    parameters = dict(layer.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("option", ["sink", "scale"])
def test_a_compiled_call_of_any_length_with_a_tensor_per_head(option):
    compiled = torch.compile(
        lambda q, k, v, x: regard.attention(q, k, v, **{option: x}), backend="aot_eager", dynamic=True
    )
    per_head = torch.rand(2)
    for length in (20, 24, 31):
        given = qkv(length, length)
        torch.testing.assert_close(compiled(*given, per_head), regard.attention(*given, **{option: per_head}))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx_over_few_keys(mode):
    given = qkv()
    traced = make_fx(lambda *x: regard.attention(*x), tracing_mode=mode)(*given)
    torch.testing.assert_close(traced(*given), regard.attention(*given))


def test_operations_are_counted():
    q, k, v = (x.requires_grad_() for x in qkv(6, 10))
    with FlopCounterMode(display=False) as counter:
        regard.attention(q, k, v, normalizer="entmax15").sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 6 * 10 * (4 + 4) + 2 * 2 * 6 * 10 * 5 * 4


def test_torchs_names():
    q, k, v = qkv()
    torch.testing.assert_close(regard.attention(query=q, key=k, value=v), regard.attention(q, k, v))
    assert regard.attention_path(query=q, key=k, value=v).backend == "torch"
    with pytest.raises(TypeError, match="both q and query"):
        regard.attention(q=q, query=q, k=k, v=v)
    names = dict(causal="is_causal", normaliser="normalizer", mask="attn_mask", sliding_window="window")
    for other, ours in {**names, "logits_soft_cap": "softcap"}.items():
        with pytest.raises(TypeError, match=f"no argument '{other}'; it is called '{ours}' here"):
            regard.attention(q, k, v, **{other: None})


@pytest.mark.parametrize("normalizer", ["softmax", "sparsemax"])
def test_dropping_everything(normalizer):
    q, k, v = (x.requires_grad_() for x in qkv())
    for _ in range(2):
        out = regard.attention(q, k, v, dropout_p=1.0, normalizer=normalizer)
        out.sum().backward()
        assert out.eq(0).all() and v.grad.eq(0).all() and q.grad.eq(0).all()
    assert regard.attention(q, k, v, normalizer=normalizer).abs().sum() > 0
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        regard.attention(q, k, v, dropout_p=1.5)


@pytest.mark.parametrize("call", [
    lambda z: regard.sparsemax(z, -1, 3),
    lambda z: regard.entmax15(z, -1, 3),
    lambda z: regard.entmax(z, 1.5, -1, 50),
    lambda z: regard.sparsemax(z, k=3),
    lambda z: regard.entmax(z, 1.5, n_iter=50),
    lambda z: regard.entmax(z, 1.5, ensure_sum_one=True),
])  # fmt: skip
def test_arguments_that_mean_something_else_in_entmax_are_refused(call):
    with pytest.raises(TypeError, match=r"positional|'k'|'n_iter'|'ensure_sum_one'"):
        call(torch.randn(2, 5))
