"""Attention as torch's compiler has it: an op with a fake, whole graphs, shapes without numbers, any default device."""

import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from attention_data import qkv
from score_functions import FADE

import regard
from regard._call.scores import resolve_scale


def test_op_passes_opcheck():
    q, k, v = qkv(1, 2, 5, 4)
    bias, temperature = torch.randn(1, 1, 5, 5, requires_grad=True), torch.ones(1, 2, 1, requires_grad=True)
    sink, lengths = torch.zeros(1, 2, 1, requires_grad=True), torch.tensor([4], dtype=torch.int32)
    stats = "visible_keys,mean_logit,logit_variance,logsumexp,mass,entropy"
    options = ("softmax", 0.5, 0.0, True, -1, -1, 0.0, stats, "", "cpu")
    torch.library.opcheck(
        torch.ops.regard.attention.default, (q, k, v, bias, None, temperature, sink, lengths, *[None] * 6, *options)
    )
    options = ("entmax15", 0.5, 2.0, False, 3, 1, 0.0, "", "", "cpu")
    mask = torch.rand(1, 1, 5, 5) > 0.3
    torch.library.opcheck(torch.ops.regard.attention.default, (q, k, v, None, mask, *[None] * 9, *options))
    interval = torch.tensor([[0, 0, 1, 2, 2], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4]], dtype=torch.int32)[:, None, None]
    row_bias, relative = torch.randn(1, 2, 5, requires_grad=True), torch.randn(2, 9, requires_grad=True)
    given = q, k, v, *[None] * 6, interval, row_bias, relative
    torch.library.opcheck(torch.ops.regard.attention.default, (*given, None, None, *options))
    options = ("entmax", 0.5, 0.0, True, -1, -1, 0.0, "", "", "cpu")
    alpha = torch.full((1, 2, 1), 1.25, requires_grad=True)
    torch.library.opcheck(torch.ops.regard.attention.default, (q, k, v, *[None] * 9, alpha, None, *options))
    options = ("entmax15", 0.5, 0.0, False, 3, 1, 0.0, "", FADE.key, "cpu")
    torch.library.opcheck(torch.ops.regard.attention.default, (*given, None, torch.full((1, 2), 0.3), *options))


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
        for name in ("softmax", "entmax15", "entmax(alpha=1.002)"):
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
for name, options in (
    ("softmax", dict(attn_mask=bias, temperature=2.0, is_causal=True)),
    ("entmax(alpha=1.002)", dict(key_lengths=[0, 4])),
):
    out, stats = regard.attention(z, z, z, normalizer=name, return_stats=True, **options)
    (out.sum() + regard.normalize(z, name).sum() + regard.logsumexp(z, temperature=2.0).sum()).backward()
    assert stats.entropy.isfinite().all() and z.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
