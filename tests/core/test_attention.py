"""regard.attention as people call it: torch's equal where both accept, exact about its limits, clear about nonsense."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from attention_data import qkv
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import _facts, normalizers
from regard._call.problem import Problem
from regard._core.dispatch import choose

MASKS = {
    "none": lambda m, n: {},
    "causal": lambda m, n: {"is_causal": True},
    "bool": lambda m, n: {"attn_mask": torch.rand(m, n, generator=torch.Generator().manual_seed(1)) > 0.3},
    "bias": lambda m, n: {"attn_mask": torch.randn(2, 1, m, n, generator=torch.Generator().manual_seed(2))},
    "row": lambda m, n: {"attn_mask": torch.rand(2, 1, 1, n, generator=torch.Generator().manual_seed(3)) > 0.3},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink", [10.03, 1e5])
def test_a_sink_written_as_a_number_is_not_rounded_to_16_bits(sink, dtype):
    q, k, v = 4 * torch.randn(3, 1, 2, 5, 4).to(dtype)
    found = regard.attention(q, k, v, sink=sink, return_stats=("logsumexp",))[1].logsumexp
    want = regard.reference.attention(q, k, v, sink=sink, return_stats=("logsumexp",))[2].logsumexp
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-5)


def test_numpys_numbers_are_numbers():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    plain = dict(scale=0.5, sink=0.25, softcap=3.0, temperature=2.0, dropout_p=0.0)
    theirs = {name: np.float32(number) for name, number in plain.items()}
    want = regard.attention(q, k, v, window=(2, None), is_causal=True, **plain)
    theirs["is_causal"] = np.bool_(True)
    assert torch.equal(regard.attention(q, k, v, window=(np.int64(2), None), **theirs), want)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("keys", [9, 14])
def test_torchs_own_causal_masks_that_hold_no_numbers(make, keys):
    q, k, v = qkv(2, 4, 9, 8, dtype=torch.float64, keys=keys)
    mask = make(9, keys)
    want = sdpa(q, k, v, attn_mask=mask)
    shown = torch.ones(9, keys, dtype=torch.bool).tril(keys - 9 if make is causal_lower_right else 0)
    for backend in (None, "cpu", "reference"):
        assert torch.allclose(regard.attention(q, k, v, mask, backend=backend), want)
    out, stats = regard.attention(q, k, v, mask, return_stats=True)
    assert torch.allclose(out, want) and torch.equal(stats.visible_keys[0, 0], shown.sum(-1).double())
    assert torch.allclose(regard.reference.attention(q, k, v, mask)[0], want)
    layer = regard.nn.MultiheadAttention(8, 2)
    x, y = torch.randn(1, 9, 8), torch.randn(1, keys, 8)
    assert torch.allclose(layer(x, y, attn_mask=mask), layer(x, y, attn_mask=shown), atol=1e-6)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize(("mask", "keys", "heads"), list(itertools.product(MASKS, (9, 5, 14), (4, 2))))
def test_equal_to_torch(backend, mask, keys, heads):
    q, k, v = qkv(2, 4, 9, 8, dtype=torch.float64, keys=keys, kv_heads=heads, value_dim=6)
    options = MASKS[mask](9, keys)
    if "attn_mask" in options and options["attn_mask"].dtype == torch.bool:
        options["attn_mask"][..., 0] = True  # torch is NaN on rows that see nothing
    elif "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].double()
    options.update(scale=0.3, enable_gqa=heads != 4)
    want = sdpa(q, k, v, **options)
    got = regard.attention(q, k, v, **options, backend=backend)
    assert torch.allclose(got, want, atol=1e-12)
    do = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-11)


@pytest.mark.parametrize("shape", [(5, 3), (4, 5, 3), (2, 3, 4, 5, 3), (2, 2, 0, 3), (0, 2, 4, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_any_leading_dims(shape, backend):
    q, k, v = qkv(*shape, dtype=torch.float64)
    out, stats = regard.attention(q, k, v, normalizer="softmax1", return_stats=True)
    want = regard.reference.attention(q, k, v, normalizer="softmax1")[0]
    assert out.shape == want.shape and torch.allclose(out, want)
    assert stats.entropy.shape == shape[:-1]
    assert torch.allclose(regard.attention(q, k, v, is_causal=True, backend=backend), sdpa(q, k, v, is_causal=True))


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("shared", [False, True])
def test_key_lengths_of_three_dims_count_torchs_batch(backend, shared):
    """(N, L, D) is torch's batch of N without heads: the same as (N, 1, L, D), also where k and v serve all of it."""
    q, k, v = qkv(3, 5, 4, keys=6)
    k, v = (k[:1], v[:1]) if shared else (k, v)
    options = dict(key_lengths=torch.tensor([6, 0, 2]), backend=backend)
    for flat in ({}, dict(attn_mask=torch.rand(3, 5, 6) > 0.3), dict(temperature=0.5 + torch.rand(3, 5, 1))):
        heads = {name: x[:, None] for name, x in flat.items()}
        got = regard.attention(q, k, v, **options, **flat)
        want = regard.attention(q[:, None], k[:, None], v[:, None], **options, **heads)
        assert got.shape == (3, 5, 4) and torch.equal(got, want[:, 0])
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)]
        assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


def test_no_keys_at_all():
    q, k, v = qkv(1, 2, 3, 4, keys=0)
    for backend in (None, "cpu", "reference"):
        out = regard.attention(q, k, v, backend=backend)
        assert torch.equal(out, torch.zeros(1, 2, 3, 4))
        out.sum().backward()


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_no_query_sees_changes_nothing(backend, bad):
    for hide in ("lengths", "causal", "window", "mask", "bias"):
        q, k, v = qkv(2, 2, 4, 8, keys=9)
        options = {
            "lengths": dict(key_lengths=torch.tensor([5, 5])),
            "causal": dict(is_causal=True),
            "window": dict(window=(2, 1)),
            "mask": dict(attn_mask=(torch.arange(9) < 5).expand(4, 9)),
            "bias": dict(attn_mask=torch.zeros(9).masked_fill(torch.arange(9) >= 5, -math.inf).expand(4, 9)),
        }[hide]
        clean = regard.attention(q, k, v, **options, backend=backend)
        grads = torch.autograd.grad(clean.sum(), (q, k, v))
        k2, v2 = (x.detach().clone() for x in (k, v))
        k2[:, :, 5:], v2[:, :, 5:] = bad, bad
        k2.requires_grad_(), v2.requires_grad_()
        spoilt = regard.attention(q, k2, v2, **options, backend=backend)
        assert torch.equal(clean, spoilt), hide
        again = torch.autograd.grad(spoilt.sum(), (q, k2, v2))
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), hide


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_a_row_that_sees_nothing_is_zero(backend):
    q, k, v = qkv(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    for attn_mask in (mask, torch.zeros(4, 4).masked_fill(~mask, -math.inf)):
        out = regard.attention(q, k, v, attn_mask=attn_mask, backend=backend)
        assert (out[:, :, 1] == 0).all()
        dq = torch.autograd.grad(out.sum(), q)[0]
        assert (dq[:, :, 1] == 0).all() and dq.isfinite().all()


def test_huge_logits_stay_finite():
    q, k, v = qkv(1, 1, 8, 4, dtype=torch.bfloat16)
    for name in normalizers.names():
        out, stats = regard.attention(q * 100, k * 100, v, scale=1.0, normalizer=name, return_stats=True)
        assert out.isfinite().all() and all(x.isfinite().all() for x in stats.values()), name


def test_path_says_why():
    q, k, v = qkv(1, 2, 4, 8)
    path = regard.attention_path
    assert path(q, k, v).backend == "torch"
    assert path(q, k, v, is_causal=True, temperature=2.0).backend == "torch"
    for options, word in (
        (dict(return_stats=True), "statistics"),
        (dict(normalizer="entmax15"), "entmax15"),
        (dict(softcap=30.0), "soft cap"),
        (dict(window=(1, 0)), "window"),
        (dict(sink=torch.zeros(2)), "sink"),
    ):
        assert path(q, k, v, **options).backend == "cpu" and word in path(q, k, v, **options).reason
    assert path(q, k, v, normalizer="entmax(alpha=1.002)").backend == "reference"


def test_heads_too_wide_for_a_gpu_go_by_the_reference(monkeypatch):
    room = {"shared_memory_per_block_optin": 232448}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**room))
    choice = normalizers.get("entmax15")
    _facts.clear()
    with FakeTensorMode():
        for dtype, width, backend in (
            (torch.bfloat16, 1024, "triton"),
            (torch.bfloat16, 1025, "reference"),
            (torch.float32, 512, "triton"),
            (torch.float32, 513, "reference"),
        ):
            q = torch.empty(1, 1, 4, width, dtype=dtype, device="cuda")
            problem = Problem(q, q, q, choice, 1.0)
            assert choose(problem, None, None).backend == backend
            if backend == "reference":
                with pytest.raises(ValueError, match=f"heads of {width}, for which the GPU"):
                    choose(problem, None, "triton")
    _facts.clear()


def test_the_same_bits_every_time():
    q, k, v = qkv(2, 4, 33, 16)
    runs = []
    for _ in range(3):
        out, stats = regard.attention(q, k, v, is_causal=True, return_stats=True)
        runs.append((out, *stats.values(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


Q = torch.randn(1, 4, 6, 8)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: regard.attention(Q, Q[..., :4], Q), ValueError, "head_dim"),
        (lambda: regard.attention(Q, Q, Q[:, :, :3]), ValueError, "length"),
        (lambda: regard.attention(Q, Q[:, :3], Q[:, :3], enable_gqa=True), ValueError, "multiple"),
        (lambda: regard.attention(Q, Q[:, :2], Q[:, :2]), ValueError, "enable_gqa"),
        (lambda: regard.attention(Q, Q.double(), Q), TypeError, "dtype"),
        (lambda: regard.attention(Q, Q.to("meta"), Q), ValueError, "device"),
        (
            lambda: regard.attention(Q, Q, Q, torch.ones(6, 6, device="meta")),
            ValueError,
            "attn_mask must be on q's device",
        ),
        (lambda: regard.attention(Q, Q, Q, softcap=5.0, temperature=1e-40), ValueError, "temperature must lie between"),
        (lambda: regard.attention(Q.long(), Q.long(), Q.long()), TypeError, "float"),
        (
            lambda: regard.attention(Q, Q, Q, attn_mask=torch.ones(6, 6).bool(), is_causal=True, backend="torch"),
            ValueError,
            "a mask beside causal order",
        ),
        (lambda: regard.attention(Q, Q, Q, attn_mask=torch.ones(6, 5).bool()), ValueError, "attn_mask"),
        (lambda: regard.attention(Q, Q, Q, attn_mask=torch.ones(6, 6).long()), TypeError, "attn_mask"),
        (lambda: regard.attention(Q, Q, Q, return_stats=("entrpy",)), ValueError, "entropy"),
        (lambda: regard.attention(Q, Q, Q, dropout_p=1.1), ValueError, "dropout_p"),
        (lambda: regard.attention(Q, Q, Q, dropout_p=-0.1), ValueError, "dropout_p"),
        (lambda: regard.attention(Q, Q, Q, dropout_p=0.5, return_stats=True), ValueError, "dropout"),
        (lambda: regard.attention(Q, Q, Q, normalizer="sofmax"), ValueError, "softmax"),
        (lambda: regard.attention(Q, Q, Q, temperature=0.0), ValueError, "temperature"),
        (
            lambda: regard.attention(Q, Q, Q, temperature=1e-45, normalizer="relu"),
            ValueError,
            "temperature must lie between 1e-20 and 1e[+]20",
        ),
        (lambda: regard.attention(Q, Q, Q, temperature=1e300, softcap=2.0), ValueError, "temperature must lie between"),
        (lambda: regard.attention(Q, Q, Q, temperature=torch.ones(5)), ValueError, "temperature"),
        (lambda: regard.attention(Q, Q, Q, softcap=-1.0), ValueError, "softcap"),
        (lambda: regard.attention(Q, Q, Q, softcap=1e300), ValueError, "softcap must lie between"),
        (lambda: regard.attention(Q, Q, Q, softcap=1e-320), ValueError, "softcap must lie between"),
        (lambda: regard.attention(Q, Q, Q, scale=-1e300), ValueError, "scale must lie within"),
        (lambda: regard.attention(Q, Q, Q, scale=1e300, return_stats=True), ValueError, "scale must lie within"),
        (lambda: regard.attention(Q, Q, Q, softcap=Fraction(1, 2)), ValueError, "softcap must be a positive number"),
        (lambda: regard.attention(Q, Q, Q, window=(-1, 0)), ValueError, "window"),
        (lambda: regard.attention(Q, Q, Q, window=3), ValueError, "window"),
        (lambda: regard.attention(Q, Q, Q, key_lengths=torch.tensor([7])), ValueError, "key_lengths"),
        (lambda: regard.attention(Q, Q, Q, key_lengths=torch.tensor([1, 2])), ValueError, "key_lengths"),
        (lambda: regard.attention(Q, Q, Q, key_lengths=torch.tensor([1.0])), TypeError, "key_lengths"),
        (lambda: regard.attention(Q, Q, Q, sink=torch.zeros(3)), ValueError, "sink"),
        (lambda: regard.attention(Q, Q, Q, sink=torch.zeros(4), normalizer="relu"), ValueError, "sink"),
        (lambda: regard.attention(Q, Q, Q, scale="cube"), ValueError, "scale"),
        (lambda: regard.attention(Q, Q, Q, backend="cuda"), ValueError, "backend"),
        (lambda: regard.attention(Q, Q, Q, backend="torch", return_stats=True), ValueError, "statistics"),
        (lambda: regard.attention(Q, Q, Q, backend="cpu", normalizer="entmax(alpha=1.002)"), ValueError, "reference"),
    ],
)
def test_nonsense_is_named_before_any_work(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("attn_mask", torch.ones(6, 6)),
        ("attn_mask", torch.ones(6, 6).bool()),
        ("scale", torch.ones(4)),
        ("temperature", torch.ones(6, 1)),
        ("sink", torch.ones(4)),
        ("key_lengths", torch.tensor([3])),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_its_name(name, given):
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor"):
        regard.attention(Q, Q, Q, **{name: given.to_sparse()})


@pytest.mark.parametrize("name", ["scale", "temperature", "softcap", "sink"])
def test_a_number_that_no_float_holds_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        regard.attention(Q, Q, Q, **{name: 10**400})
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        regard.attention(Q, Q, Q, **{name: Fraction(1, 3)})
    if name != "sink":
        with pytest.raises(ValueError, match=f"{name} must lie (between|within)"):
            regard.attention(*[Q.double()] * 3, **{name: 2**1023})
    with pytest.raises(ValueError, match="key_lengths must lie in"):
        regard.attention(Q, Q, Q, key_lengths=[10**400])


def test_a_policy_that_was_not_made_is_refused():
    for policy in (regard.temperature.SSMax, regard.temperature.Learned):
        with pytest.raises(TypeError, match=f"got the class {policy.__name__}; make one"):
            regard.attention(Q, Q, Q, temperature=policy)


def test_the_reference_path_never_builds_the_whole_matrix(monkeypatch):
    """Long sequences go block by block: the same result, gradients, statistics and dropout as in one piece."""
    q, k, v = qkv(1, 2, 11, 4, dtype=torch.float64)
    options = dict(is_causal=True, normalizer="softmax1", temperature=torch.rand(11, 1) + 0.5, backend="reference")

    def run():
        torch.manual_seed(0)
        out, stats = regard.attention(q, k, v, return_stats=True, **options)
        dropped = regard.attention(q, k, v, dropout_p=0.4, **options)
        grads = torch.autograd.grad(out.square().sum() + dropped.square().sum() + stats.entropy.sum(), (q, k, v))
        return [out, dropped, *stats.values(), *grads]

    whole = run()
    monkeypatch.setattr(regard.reference, "BLOCK", 4)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(whole, run(), strict=True))
