"""The output gate o·σ(g): every path against the reference, its derivatives, its shapes, what is refused."""

from functools import partial

import pytest
import torch
from attention_data import qkv

import regard
from regard import normalizers
from regard._core import formulas as module

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
SHAPES = {"head": (2, 4, 7), "head with a width": (2, 4, 7, 1), "element": (2, 4, 7, 3), "of each head": (4, 1, 1)}


def drawn(shape, dtype=torch.float64):
    """Logits of open, shut and half-open gates."""
    generator = torch.Generator().manual_seed(5)
    return (4.0 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def problem(dtype=torch.float64):
    return qkv(2, 4, 7, 5, dtype=dtype, keys=10, kv_heads=2, value_dim=3)


@pytest.mark.parametrize("name", normalizers.names())
@pytest.mark.parametrize("kind", ["head", "head with a width", "element"])
def test_a_gate_is_the_references(name, kind):
    q, k, v = problem()
    g = drawn(SHAPES[kind])
    options = dict(normalizer=name, enable_gqa=True, key_lengths=torch.tensor([10, 0]))
    found = [regard.attention(q, k, v, gate=g, **options) for _ in range(2)]
    out, stats = regard.attention(q, k, v, gate=g, return_stats=True, **options)
    plain, ungated = regard.attention(q, k, v, return_stats=True, **options)
    truth, _ = regard.reference.attention(q, k, v, gate=g, **options)
    for one in (*found, out):
        torch.testing.assert_close(one, truth)
    torch.testing.assert_close(out, plain * torch.sigmoid(g if g.ndim == 4 else g[..., None]))
    assert all(torch.equal(stats[key], ungated[key]) for key in ungated)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    want = torch.autograd.grad(truth, (q, k, v, g), upstream)
    for one in (found[1], out):
        for ours, theirs in zip(torch.autograd.grad(one, (q, k, v, g), upstream), want, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_one_gate_for_every_row_of_a_head_gets_the_sum_of_their_gradients():
    q, k, v = qkv(2, 4, 7, 5, dtype=torch.float64)
    g = drawn(SHAPES["of each head"])
    with pytest.raises(ValueError, match=r"gate must broadcast to \(2, 4, 7\)"):
        regard.attention(q, k, v, gate=g[..., 0, 0])
    out = regard.attention(q, k, v, gate=g[None], is_causal=True)
    torch.testing.assert_close(out, regard.attention(q, k, v, is_causal=True) * torch.sigmoid(g))
    (found,) = torch.autograd.grad(out.cos().sum(), g)
    (want,) = torch.autograd.grad((regard.attention(q, k, v, is_causal=True) * torch.sigmoid(g)).cos().sum(), g)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid"])
def test_derivatives_of_both_orders(name):
    q, k, v = qkv(1, 2, 3, 2, dtype=torch.float64)
    g = drawn((1, 2, 3))

    def call(q, k, v, g):
        return regard.attention(q, k, v, gate=g, normalizer=name, is_causal=True)

    assert torch.autograd.gradcheck(call, (q, k, v, g))
    assert torch.autograd.gradgradcheck(call, (q, k, v, g), atol=1e-4)
    _, found = torch.func.jvp(lambda g: call(q, k, v, g), (g.detach(),), (torch.ones_like(g),))
    torch.testing.assert_close(found, call(q, k, v, g) * (1.0 - torch.sigmoid(g))[..., None])


def test_a_shut_gate_leaves_nothing_and_no_nan():
    q, k, v = problem(torch.float32)
    g = torch.full((2, 4, 7), -torch.inf, requires_grad=True)
    out = regard.attention(q, k, v, gate=g, enable_gqa=True)
    assert (out == 0).all()
    out.sum().backward()
    assert (g.grad == 0).all() and (q.grad == 0).all() and (v.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_sixteen_bits_round_once(dtype, wide):
    q, k, v = problem(dtype)
    g = drawn(SHAPES["element"], torch.float32 if wide else dtype)
    o = regard.attention(q, k, v, enable_gqa=True).detach()
    out = regard.attention(q, k, v, gate=g, enable_gqa=True)
    assert out.dtype == dtype
    assert torch.equal(out, (o.float() * torch.sigmoid(g.float())).to(dtype))
    out.float().sum().backward()
    assert g.grad.dtype == g.dtype and q.grad.dtype == dtype


def test_vmap_and_compile():
    q, k, v = (x.detach() for x in qkv(2, 4, 7, 5))
    g = drawn((2, 4, 7, 5), torch.float32).detach()

    def call(q, k, v, g):
        return regard.attention(q, k, v, gate=g, normalizer="entmax15")

    want = call(q, k, v, g)
    torch.testing.assert_close(torch.vmap(call)(q, k, v, g), want)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(q, k, v, g), want)


def test_packed_documents_take_a_gate_per_token():
    q = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    for shape in ((5, 2), (5, 2, 8)):
        g = drawn(shape, torch.float32)
        out = regard.attention_varlen(q, q, q, [0, 2, 5], gate=g)
        plain = regard.attention_varlen(q, q, q, [0, 2, 5])
        torch.testing.assert_close(out, plain * torch.sigmoid(g.reshape(5, 2, -1)))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (1.0, TypeError, "gate must be a tensor of float16 or wider, logits before the sigmoid, got float"),
        (torch.ones(2, 4, 7, dtype=torch.int64), TypeError, "got torch.int64"),
        (torch.ones(2, 4, 6), ValueError, r"gate must broadcast to \(2, 4, 7\), one logit per head, or \(2, 4, 7, 3\)"),
        (torch.ones(2, 4, 7, 2), ValueError, "one per element, got shape"),
        (torch.ones(7), ValueError, "gate must broadcast"),
        (torch.ones(1, 2, 4, 7, 3), ValueError, "gate must broadcast"),
        (torch.ones(2, 4, 7, device="meta"), ValueError, "gate must be on q's device cpu, got meta"),
    ],
)
def test_what_is_refused(wrong, error, words):
    q, k, v = problem(torch.float32)
    for _ in range(2):  # no plan is kept
        with pytest.raises(error, match=words):
            regard.attention(q, k, v, gate=wrong, enable_gqa=True)


def test_two_dims_and_five():
    for lead in ((), (3,), (2, 1, 4)):
        q = torch.randn(*lead, 6, 5, generator=torch.Generator().manual_seed(0))
        for shape in ((*lead, 6), (*lead, 6, 1), (*lead, 6, 5)):
            g = drawn(shape, torch.float32)
            want = regard.attention(q, q, q) * torch.sigmoid(g.reshape(*lead, 6, -1))
            torch.testing.assert_close(regard.attention(q, q, q, gate=g), want)


def test_the_fused_functions_second_derivatives_are_the_formulas(monkeypatch):
    """FusedFormula with the kernels' place taken by the formula: what create_graph=True and batched gradients run."""
    pytest.importorskip("triton")
    o, g = drawn((1, 2, 3, 4)), drawn((1, 2, 3, 1))
    from regard._backends.gpu import gate as kernels

    monkeypatch.setattr(kernels, "forward", module.multiply)
    gate = partial(module.FusedFormula.apply, kernels, module.multiply, ())
    assert torch.autograd.gradgradcheck(gate, (o, g))
    out = gate(o, g)
    basis = torch.eye(24, dtype=torch.float64).reshape(24, *o.shape)
    found = torch.autograd.grad(out, (o, g), basis, is_grads_batched=True, retain_graph=True)
    want = torch.autograd.grad(module.multiply(o, g), (o, g), basis, is_grads_batched=True)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs)
