"""Every option of regard.attention against the reference: bias, scale, temperature, window, dropout; all at once."""

import sys
import typing

import pytest
import torch
import torch._dynamo.testing
from attention_data import qkv
from rows_data import FUSED
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import normalizers
from regard.masks import dense


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_an_expanded_bias_has_a_gradient_for_each_entry(name):
    q, k, v = (x.detach() for x in qkv(2, 2, 3, 4, dtype=torch.float64))
    small = torch.randn(3, 3, dtype=torch.float64)
    full = small.expand(2, 2, 3, 3)

    def loss(bias):
        return regard.attention(q, k, v, bias, normalizer=name).cos().sum()

    copied, leaf = full.clone().requires_grad_(), full.detach().requires_grad_()
    want = torch.autograd.grad(loss(copied), copied)[0]
    assert torch.allclose(torch.autograd.grad(loss(leaf), leaf)[0], want)
    assert torch.allclose(torch.func.grad(loss)(full), want)
    kept = small.clone().requires_grad_().expand(2, 2, 3, 3)
    kept.retain_grad()
    loss(kept).backward()
    assert torch.allclose(kept.grad, want)
    small.requires_grad_()
    assert torch.allclose(torch.autograd.grad(loss(small.expand(2, 2, 3, 3)), small)[0], want.sum((0, 1)))


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("far", [2**31, sys.maxsize, 2**70])
def test_a_side_of_the_window_beyond_all_keys_is_no_limit(backend, far):
    q, k, v = qkv(1, 2, 7, 4, keys=5)
    for window, limited in (((far, far), None), ((1, far), (1, None)), ((far, 1), (None, 1))):
        want = regard.attention(q, k, v, window=limited, backend=backend)
        assert torch.allclose(regard.attention(q, k, v, window=window, backend=backend), want, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_bias_beside_short_queries_is_not_rounded(dtype):
    """As torch does; slopes times distances of a few hundred, in 16 bits, would tell neighbours apart no more."""
    q, k, v = (x.detach() for x in qkv(1, 2, 9, 16, dtype=dtype))
    small = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    for bias in (100.0 * small, small - 1e4, small.half(), small.bfloat16()):
        want = regard.reference.attention(q, k, v, bias)[0].to(dtype)
        assert torch.allclose(regard.attention(q, k, v, bias), want, atol=0.02), bias.dtype
        assert torch.allclose(regard.attention(q, k, v, bias, return_stats=True)[0], want, atol=0.02), bias.dtype
        bias.requires_grad_()
        (db,) = torch.autograd.grad(regard.attention(q, k, v, bias).float().cos().sum(), bias)
        assert db.dtype == bias.dtype and db.isfinite().all()
    assert torch.equal(regard.attention(q, k, v, 100.0 * small), sdpa(q, k, v, 100.0 * small))


@pytest.mark.parametrize("name", FUSED)
def test_every_normaliser_option_and_statistic(name):
    q, k, v = qkv(2, 4, 7, 5, dtype=torch.float64, keys=10, kv_heads=2, value_dim=3)
    bias = torch.randn(1, 4, 7, 10, dtype=torch.float64).requires_grad_()
    temperature = (0.5 + torch.rand(2, 4, 7, 1, dtype=torch.float64)).requires_grad_()
    options = dict(softcap=3.0, window=(4, 3), key_lengths=torch.tensor([10, 6]), enable_gqa=True, normalizer=name)
    tensors = [q, k, v, bias, temperature]
    if name.startswith("softmax"):
        options["sink"] = torch.randn(4, dtype=torch.float64).requires_grad_()
        tensors.append(options["sink"])
    call = dict(attn_mask=bias, temperature=temperature, scale="sqrt", **options)
    out, stats = regard.attention(q, k, v, return_stats=True, backend="cpu", **call)
    want, _, dense = regard.reference.attention(q, k, v, return_stats=True, **call)
    assert torch.allclose(out, want, atol=1e-10)
    for key in dense:
        assert torch.allclose(stats[key], dense[key], rtol=1e-7, atol=1e-9), key
    loss, oracle = out.cos().sum(), want.cos().sum()
    if name.startswith("softmax"):  # an entropy penalty, a z-loss and a variance penalty in the same backward
        for key, weight in (("entropy", 0.7), ("logsumexp", 0.3), ("logit_variance", 0.2)):
            loss, oracle = loss + weight * stats[key].square().sum(), oracle + weight * dense[key].square().sum()
    for ours, theirs in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(oracle, tensors), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-8)


@pytest.mark.parametrize("name", normalizers.names())
def test_which_statistics_carry_gradients(name):
    q, k, v = qkv(1, 1, 4, 3)
    _, stats = regard.attention(q, k, v, normalizer=name, return_stats=True)
    carrying = {key for key, x in stats.items() if x.requires_grad}
    assert carrying == ({"entropy", "logsumexp", "logit_variance"} if name.startswith("softmax") else set())


def test_dropout_follows_torchs_seed_and_keeps_the_mean():
    q, k, v = qkv(2, 2, 16, 8)

    def run(seed, **options):
        torch.manual_seed(seed)
        return regard.attention(q, k, v, dropout_p=0.3, normalizer="softmax1", **options)

    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))
    mean = torch.stack([run(seed) for seed in range(400)]).mean(0)
    assert torch.allclose(mean, regard.attention(q, k, v, normalizer="softmax1"), atol=0.1)
    assert torch.allclose(run(3, backend="cpu"), run(3, backend="reference"), atol=1e-5)
    dv = [torch.autograd.grad(run(3, backend=b).square().sum(), v)[0] for b in ("cpu", "reference")]
    assert torch.allclose(dv[0], dv[1], atol=1e-4)


def test_scales():
    q, k, v = qkv(1, 3, 4, 16)
    for scale, number in ((None, 0.25), ("sqrt", 0.25), ("inverse", 1 / 16), ("none", 1.0)):
        assert torch.allclose(regard.attention(q, k, v, scale=scale), sdpa(q, k, v, scale=number), atol=1e-6)
    per_head = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    out = regard.attention(q, k, v, scale=per_head)
    for head in range(3):
        want = sdpa(q[:, head], k[:, head], v[:, head], scale=per_head[head].item())
        assert torch.allclose(out[:, head], want, atol=1e-6)
    assert torch.autograd.grad(out.sum(), per_head)[0].shape == (3,)


def test_policies_reach_the_kernels():
    q, k, v = qkv(1, 2, 9, 4)
    out = regard.attention(q, k, v, is_causal=True, temperature=regard.temperature.SSMax(0.43))
    n = torch.arange(1.0, 10.0).clamp_min(2)[:, None]
    want = regard.reference.attention(q, k, v, is_causal=True, temperature=1 / (0.43 * n.log()))[0]
    assert torch.allclose(out, want.float(), atol=1e-5)
    learned = regard.temperature.SSMax(torch.tensor([0.3, 0.5]), learn=True)
    regard.attention(q, k, v, temperature=learned).square().sum().backward()
    assert (learned.s.grad != 0).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_bias_that_the_caller_expanded(backend):
    q, k, v = qkv(2, 3, 5, 4, dtype=torch.float64)
    bias = torch.randn(1, 3, 1, 5, dtype=torch.float64, requires_grad=True)
    options = dict(normalizer="softmax1", backend=backend)
    once = torch.autograd.grad(regard.attention(q, k, v, attn_mask=bias, **options).square().sum(), bias)[0]
    wide = regard.attention(q, k, v, attn_mask=bias.expand(2, 3, 5, 5), **options)
    assert torch.allclose(torch.autograd.grad(wide.square().sum(), bias)[0], once, atol=1e-12)


def test_the_reference_takes_the_same_options():
    q, k, v = (x.detach() for x in qkv(2, 3, 4, 8))
    for options in (
        dict(key_lengths=[1, 2]),
        dict(sink=0.5),
        dict(sink=torch.randn(3, 4, 1)),
        dict(temperature=regard.temperature.SSMax(), is_causal=True),
    ):
        want = regard.reference.attention(q, k, v, **options)[0]
        assert torch.allclose(regard.attention(q, k, v, **options), want.float(), atol=1e-5)


@pytest.mark.parametrize("function", [regard.attention, regard.reference.attention])
def test_a_type_checker_allows_what_a_call_takes(function):
    """A number as sink and a list of key_lengths: the package says that it is typed."""
    q, k, v = qkv(2, 2, 5, 3)
    hints = typing.get_type_hints(function)
    for name, given in dict(sink=0.5, key_lengths=[2, 5]).items():
        regard.attention(q, k, v, **{name: given})
        allowed = [typing.get_origin(kind) or kind for kind in typing.get_args(hints[name])]
        assert any(isinstance(given, kind) for kind in allowed), hints[name]


@pytest.mark.parametrize("window", [None, (2, None), (None, 0), (None, 3), (1, 3), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_order_beside_a_window_sees_what_both_show(window, is_causal):
    """A window that looks ahead does not open what causal order hides: the oracle's mask, written out."""
    left, right = window or (None, None)
    seen = torch.tensor([
        [(left is None or j >= i - left) and (right is None or j <= i + right) and (j <= i or not is_causal)
         for j in range(7)] for i in range(2, 7)
    ])  # fmt: skip
    given = dense(5, 7, is_causal=is_causal, window_=window, first=2)
    assert torch.equal(torch.ones(5, 7, dtype=torch.bool) if given is None else given, seen)
