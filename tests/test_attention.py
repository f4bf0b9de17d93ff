"""regard.attention as people call it: torch's equal where both accept, a citizen of torch, exact about its limits."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from rows_data import FUSED
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import normalizers
from regard.scores import resolve_scale


def qkv(*shape, dtype=torch.float32, keys=None, kv_heads=None, value_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    *lead, n, d = shape
    kv_lead = [*lead[:-1], kv_heads] if kv_heads else lead
    keys = n if keys is None else keys
    shapes = ([*lead, n, d], [*kv_lead, keys, d], [*kv_lead, keys, value_dim or d])
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


MASKS = {
    "none": lambda m, n: {},
    "causal": lambda m, n: {"is_causal": True},
    "bool": lambda m, n: {"attn_mask": torch.rand(m, n, generator=torch.Generator().manual_seed(1)) > 0.3},
    "bias": lambda m, n: {"attn_mask": torch.randn(2, 1, m, n, generator=torch.Generator().manual_seed(2))},
    "row": lambda m, n: {"attn_mask": torch.rand(2, 1, 1, n, generator=torch.Generator().manual_seed(3)) > 0.3},
}


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


def test_no_keys_at_all():
    q, k, v = qkv(1, 2, 3, 4, keys=0)
    for backend in (None, "cpu", "reference"):
        out = regard.attention(q, k, v, backend=backend)
        assert torch.equal(out, torch.zeros(1, 2, 3, 4))
        out.sum().backward()


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
    assert path(q, k, v, normalizer="entmax(alpha=3)").backend == "reference"


def test_op_passes_opcheck():
    q, k, v = qkv(1, 2, 5, 4)
    bias, temperature = torch.randn(1, 1, 5, 5, requires_grad=True), torch.ones(1, 2, 1, requires_grad=True)
    sink, lengths = torch.zeros(1, 2, 1, requires_grad=True), torch.tensor([4], dtype=torch.int32)
    stats = "visible_keys,mean_logit,logit_variance,logsumexp,mass,entropy"
    options = (0.5, 0.0, True, -1, -1, 0.0, "softmax", stats, "cpu")
    torch.library.opcheck(
        torch.ops.regard.attention.default, (q, k, v, bias, None, temperature, sink, lengths, None, *options)
    )
    options = (0.5, 2.0, False, 3, 1, 0.0, "entmax15", "", "cpu")
    mask = torch.rand(1, 1, 5, 5) > 0.3
    torch.library.opcheck(torch.ops.regard.attention.default, (q, k, v, None, mask, None, None, None, None, *options))


def test_compiles_whole_and_once_for_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(q, k, v):
        out, stats = regard.attention(q, k, v, is_causal=True, normalizer="softmax1", return_stats=("entropy",))
        return out.square().sum() + stats["entropy"].sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for n in (5, 8, 13, 21):
        q, k, v = qkv(2, 2, n, 4, seed=n)
        got, want = compiled(q, k, v), loss(q, k, v)
        counts.append(counter.frame_count)
        assert torch.allclose(got, want)
        for ours, theirs in zip(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(want, (q, k, v)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
    assert counts[0] > 0 and len(set(counts)) == 1


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torchs_kernels_compile_whole_for_any_shape(kv_heads):
    torch._dynamo.reset()

    def run(q, k, v):
        return regard.attention(q, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 8):
        q, k, v = (x.detach() for x in qkv(2, 4, n, 4, kv_heads=kv_heads))
        assert torch.allclose(compiled(q, k, v), run(q, k, v), atol=1e-6)


def test_a_scale_may_be_a_symbol():
    """As the reference has it, within a compiled graph of any head_dim."""
    torch._dynamo.reset()
    scaled = torch.compile(
        lambda x: x * resolve_scale(x.shape[-1] ** -0.5, 0), fullgraph=True, backend="eager", dynamic=True
    )
    assert torch.equal(scaled(torch.ones(3, 4)), torch.full((3, 4), 0.5))


def test_fake_tensors_have_shapes_and_no_values_to_look_at():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        policies = [regard.temperature.SSMax(), regard.temperature.Adaptive()]
        q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
        lengths, temperature = torch.tensor([0, 4]), torch.rand(4, 1, 1)
        for name in ("softmax", "entmax15", "entmax(alpha=3)"):
            for options in (dict(key_lengths=lengths), *(dict(temperature=t) for t in (temperature, *policies))):
                out, stats = regard.attention(q, k, v, normalizer=name, return_stats=True, **options)
                assert out.shape == (2, 4, 5, 8) and stats.entropy.shape == (2, 4, 5)
        z, column = torch.randn(3, 7), 1.0 + torch.rand(3, 1)
        for p in (regard.entmax(z, column), regard.softmax(z, temperature=column), regard.log_softmax(z, -1, column)):
            assert p.shape == (3, 7)
        assert regard.logsumexp(z, -1, column).shape == (3,)
    assert regard.entmax(torch.empty(3, 7, device="meta"), torch.empty(3, 1, device="meta")).shape == (3, 7)
    q, k, v = (x.detach() for x in qkv(1, 2, 3, 4))
    lengths = torch.tensor([[1], [3]])
    mapped = torch.func.vmap(lambda n: regard.attention(q, k, v, key_lengths=n, backend="reference"))(lengths)
    assert torch.allclose(mapped[1], regard.attention(q, k, v), atol=1e-6)


def test_any_default_device_leaves_tensors_of_the_cpu_there():
    """`torch.set_default_device("cuda")` before the import, and a call with tensors of the CPU."""
    code = """
import torch
torch.set_default_device("meta")
import regard
z = torch.randn(2, 2, 5, 4, device="cpu", requires_grad=True)
bias = torch.randn(5, 5, device="cpu", requires_grad=True)
for name in ("softmax", "entmax(alpha=3)"):
    for options in (dict(key_lengths=[0, 4]), dict(attn_mask=bias, temperature=2.0, is_causal=True)):
        out, stats = regard.attention(z, z, z, normalizer=name, return_stats=True, **options)
        (out.sum() + regard.normalize(z, name).sum() + regard.logsumexp(z, temperature=2.0).sum()).backward()
        assert stats.entropy.isfinite().all() and z.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_checkpointing_autocast_and_vmap():
    q, k, v = qkv(2, 2, 6, 4)

    def run(q, k, v):
        return regard.attention(q, k, v, normalizer="entmax15")

    kept = torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(kept.sum(), q)[0], torch.autograd.grad(run(q, k, v).sum(), q)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(q, k, v).dtype == sdpa(q, k, v).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"must have one dtype, got torch\.float64 for q"):  # left alone
            run(q.double(), k, v)
    mapped = torch.func.vmap(run)(torch.stack([q, q + 1]), torch.stack([k, k]), torch.stack([v, v]))
    assert torch.allclose(mapped[1], run(q + 1, k, v), atol=1e-6)
    shared = torch.func.vmap(run, in_dims=(0, None, None))(torch.stack([q, q + 1]), k, v)
    assert torch.allclose(shared[1], run(q + 1, k, v), atol=1e-6)


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
        (lambda: regard.attention(Q, Q, Q, dropout_p=1.0), ValueError, "dropout_p"),
        (lambda: regard.attention(Q, Q, Q, dropout_p=-0.1), ValueError, "dropout_p"),
        (lambda: regard.attention(Q, Q, Q, dropout_p=0.5, return_stats=True), ValueError, "dropout"),
        (lambda: regard.attention(Q, Q, Q, normalizer="sofmax"), ValueError, "softmax"),
        (lambda: regard.attention(Q, Q, Q, temperature=0.0), ValueError, "temperature"),
        (
            lambda: regard.attention(Q, Q, Q, temperature=1e-45, normalizer="relu"),
            ValueError,
            "temperature=1e-45 is too",
        ),
        (lambda: regard.attention(Q, Q, Q, temperature=1e300, softcap=2.0), ValueError, "temperature must lie between"),
        (lambda: regard.attention(Q, Q, Q, temperature=torch.ones(5)), ValueError, "temperature"),
        (lambda: regard.attention(Q, Q, Q, softcap=-1.0), ValueError, "softcap"),
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
        (lambda: regard.attention(Q, Q, Q, backend="cpu", normalizer="entmax(alpha=3)"), ValueError, "reference"),
    ],
)
def test_nonsense_is_named_before_any_work(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


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


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_bias_that_the_caller_expanded(backend):
    q, k, v = qkv(2, 3, 5, 4, dtype=torch.float64)
    bias = torch.randn(1, 3, 1, 5, dtype=torch.float64, requires_grad=True)
    options = dict(normalizer="softmax1", backend=backend)
    once = torch.autograd.grad(regard.attention(q, k, v, attn_mask=bias, **options).square().sum(), bias)[0]
    wide = regard.attention(q, k, v, attn_mask=bias.expand(2, 3, 5, 5), **options)
    assert torch.allclose(torch.autograd.grad(wide.square().sum(), bias)[0], once, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
def test_entmax_at_one_is_softmax_and_transforms_are_carried():
    q, k, v = (x.detach() for x in qkv(2, 3, 4, 8))
    out, stats = regard.attention(q, k, v, normalizer="entmax(alpha=1)", return_stats=True)
    assert torch.allclose(out, sdpa(q, k, v), atol=1e-6) and stats.entropy.isfinite().all()

    def loss(q):
        return regard.attention(q, k[0], v[0], normalizer="entmax15").square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(q)
    one = q[1].clone().requires_grad_()
    assert torch.allclose(mapped[1], torch.autograd.grad(loss(one), one)[0], atol=1e-5)
    step, tangent = 1e-3, torch.randn_like(q[0])
    moved = torch.func.jvp(loss, (q[0].double().float(),), (tangent,))[1]
    slope = (loss(q[0] + step * tangent) - loss(q[0] - step * tangent)) / (2 * step)
    assert moved.item() == pytest.approx(slope.item(), rel=0.05, abs=1e-2)


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
