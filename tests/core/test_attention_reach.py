"""Attention where torch goes too: second derivatives, tangents, shapes without numbers, a learned scale in 16 bits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from attention_data import qkv
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import reference
from regard.temperature import SSMax

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode

MAPS = ["softmax", "softmax1", "sigmoid", "softpick", "entmax15", "sparsemax", "entmax(alpha=1.3)"]


def heads(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("name", MAPS)
def test_a_gradient_has_gradients(name):
    given = [x.requires_grad_() for x in heads(1, 2, 4, 3)]

    def run(q, k, v):
        return regard.attention(q, k, v, is_causal=True, normalizer=name, backend="cpu")

    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


SOFTMAX = {
    "full": {},
    "causal": dict(is_causal=True),
    "mask": dict(attn_mask=torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()),
    "bias": dict(attn_mask=torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)),
    "groups": dict(enable_gqa=True),
    "lengths": dict(key_lengths=torch.tensor([3])),
}


@pytest.mark.parametrize("options", SOFTMAX.values(), ids=SOFTMAX)
def test_so_has_that_of_torchs_own_softmax(options):
    q, k, v = heads(1, 2, 4, 3)
    given = [x.requires_grad_() for x in ((q, k[:, :1], v[:, :1]) if "enable_gqa" in options else (q, k, v))]
    assert regard.attention_path(*given, **options).backend == "torch"
    assert torch.autograd.gradgradcheck(lambda *x: regard.attention(*x, **options), given, fast_mode=True)
    for at in range(3) if not options else ():  # of one alone
        alone = [x.detach().requires_grad_(place == at) for place, x in enumerate(given)]
        assert torch.autograd.gradgradcheck(lambda *x: regard.attention(*x, **options), alone, fast_mode=True)


def test_inputs_of_torchs_own_softmax_are_let_go():
    """A loss that somebody keeps does not keep its queries, once backward has run."""
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    q = x * 2.0
    seen = weakref.ref(q)
    loss = regard.attention(q, q, q).square().sum()
    del q
    assert seen() is not None
    loss.backward()
    gc.collect()
    assert seen() is None and loss.grad_fn is not None


def test_inputs_of_torchs_own_softmax_are_not_kept_from_checkpointing():
    seen = []

    def block(x):
        q = x * 2.0
        seen.append(weakref.ref(q))
        return regard.attention(q, q, q)

    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    gc.collect()
    assert seen[0]() is None
    (ours,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(ours, torch.autograd.grad(block(x).square().sum(), x)[0])


def test_queries_that_are_keys_count_for_themselves():
    x, grads = heads(1, 2, 4, 3)[0], []
    for attend in (regard.attention, lambda *args, **options: reference.attention(*args, **options)[0]):
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(attend(y, y, y, is_causal=True).square().sum(), y, create_graph=True)
        grads.append((slope.detach(), *torch.autograd.grad(slope.square().sum(), y)))
    torch.testing.assert_close(*grads)


def test_so_have_those_of_statistics_biases_and_temperatures():
    given = [x.requires_grad_() for x in heads(1, 2, 4, 3)]
    bias, heat = torch.randn(4, 4).double().requires_grad_(), torch.rand(2, 4, 1).double().add(0.5).requires_grad_()

    def run(q, k, v, bias, heat):
        out, stats = regard.attention(q, k, v, bias, temperature=heat, return_stats=("entropy", "max_weight"))
        return out, stats.entropy

    assert torch.autograd.gradgradcheck(run, (*given, bias, heat), fast_mode=True)


def test_rows_beyond_a_block_of_the_reference():
    (q, k, v), penalties = heads(1, 1, reference.BLOCK + 9, 2), []
    for run in (regard.attention, lambda *args, **options: reference.attention(*args, **options)[0]):
        x = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(x, k, v, normalizer="softmax1").square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*penalties, rtol=1e-8, atol=1e-10)


def test_a_bias_that_hangs_on_the_queries_counts_once():
    (x, k, v), w = heads(1, 2, 4, 4), torch.randn(4, 4, dtype=torch.float64)
    grads = []
    for create_graph in (False, True):
        given = x.clone().requires_grad_()
        bias = given.tanh()
        out = regard.attention(bias @ w, k, v, attn_mask=bias, normalizer="entmax15")
        grads += torch.autograd.grad(out.square().sum(), given, create_graph=create_graph)
    torch.testing.assert_close(*grads)


def test_entropy_alone_and_values_alone():
    q, k, v = heads(1, 2, 4, 3)
    v.requires_grad_()
    _, stats = regard.attention(q, k, v, return_stats=("entropy",))
    (slope,) = torch.autograd.grad(stats.entropy.sum(), v, create_graph=True, allow_unused=True)
    assert slope is None or not slope.any()


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_tangents_and_hessians(name):
    q, k, v = heads(1, 1, 3, 2)
    run = lambda q: regard.attention(q, k, v, normalizer=name).square().sum()  # noqa: E731
    exact = lambda q: reference.attention(q, k, v, normalizer=name)[0].square().sum()  # noqa: E731
    torch.testing.assert_close(torch.func.hessian(run)(q), torch.autograd.functional.hessian(exact, q))
    direction = torch.ones_like(q)
    torch.testing.assert_close(
        torch.func.jvp(run, (q,), (direction,))[1], (torch.func.grad(exact)(q) * direction).sum()
    )


@pytest.mark.parametrize("options", [{}, dict(normalizer="entmax15"), dict(return_stats=True), dict(softcap=3.0)])
def test_shapes_alone(options):
    q = torch.empty(2, 4, 5, 8, device="meta", requires_grad=True)
    k, v = torch.empty(2, 2, 7, 8, device="meta"), torch.empty(2, 2, 7, 6, device="meta")
    out = regard.attention(q, k, v, enable_gqa=True, **options)
    if options.get("return_stats"):
        out, stats = out
        assert stats.entropy.shape == (2, 4, 5) and stats.entropy.device.type == "meta"
    assert out.shape == (2, 4, 5, 6) and out.device.type == "meta"
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("options", [{}, dict(softcap=5.0), dict(temperature=1.7), dict(temperature=SSMax())])
@pytest.mark.parametrize("scale", [0.1, [0.1, 0.1], [0.1, -0.07], [0.0, 0.3]])
def test_a_scale_per_head_is_not_rounded_to_16_bits(scale, options):
    q, k, v = heads(1, 2, 33, 64, dtype=torch.bfloat16)
    q = q * 8
    scale = torch.tensor(scale)
    out, _, exact = reference.attention(q, k, v, scale=scale, return_stats=True, **options)
    ours, stats = regard.attention(q, k, v, scale=scale, return_stats=True, **options)
    assert ours.dtype == torch.bfloat16
    for name in ("max_logit", "entropy", "logsumexp"):
        torch.testing.assert_close(stats[name].double(), exact[name], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours.double(), out, rtol=0.02, atol=0.02)
    plain = regard.attention(q, k, v, scale=scale, **options)
    torch.testing.assert_close(plain.double(), out, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tiny", [0.0, 1e-20])
def test_its_gradient_also_at_zero(tiny):
    q, k, v = heads(1, 2, 17, 16, dtype=torch.float16)
    scale = torch.tensor([0.2, tiny])
    grads = []
    for run, given in (
        (regard.attention, scale),
        (lambda *args, **options: reference.attention(*args, **options)[0], scale.double()),
    ):
        given = given.clone().requires_grad_()
        (run(q, k, v, scale=given).double() * v.double()).sum().backward()
        grads.append(given.grad.double())
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.05)


def test_torch_itself_with_a_scale_per_head():
    q, k, v = heads(1, 2, 9, 16, dtype=torch.bfloat16)
    scale = torch.tensor([0.3, -0.2])
    out = regard.attention(q, k, v, scale=scale, backend="torch")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), reference.attention(q, k, v, scale=scale)[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive_beside_causal_order(scale):
    """torch's own CPU kernel multiplies the hidden −inf by it."""
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    o = regard.attention(q, k, v, is_causal=True, scale=scale)
    truth, _ = regard.reference.attention(q, k, v, is_causal=True, scale=scale)
    torch.testing.assert_close(o, truth)
    ours, right = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (o, truth))
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2, 1, 1)])
def test_a_scale_per_head_in_any_shape_that_broadcasts(shape):
    q, k, v = (torch.randn(3, 2, 5, 4) for _ in range(3))
    scale = torch.tensor([0.3, 0.7])
    o = regard.attention(q, k, v, scale=scale.reshape(shape))
    for head, number in enumerate(scale.tolist()):
        torch.testing.assert_close(o[:, head], regard.attention(q[:, head], k[:, head], v[:, head], scale=number))
    torch.testing.assert_close(o, reference.attention(q, k, v, scale=scale.reshape(shape))[0].float())
    with pytest.raises(ValueError, match="one per head"):
        regard.attention(q, k, v, scale=torch.ones(3, 2, 1, 1))


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


BESIDES = {
    "temperature": torch.tensor([0.7, 1.4], dtype=torch.float64).reshape(2, 1, 1),
    "sink": torch.tensor([0.3, -1.0], dtype=torch.float64),
    "attn_mask": torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4),
    "scale": torch.tensor([0.5, -0.3], dtype=torch.float64),
}


@pytest.mark.parametrize("name", BESIDES)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "capped"])
def test_a_tangent_of_what_stands_beside_the_queries_arrives(name, options):
    q, k, v = heads(2, 2, 4, 3)
    at, along = BESIDES[name], torch.ones_like(BESIDES[name])
    forward = torch.autograd.forward_ad

    def tangent(attention):
        with forward.dual_level():
            out = attention(q, k, v, **{name: forward.make_dual(at, along)}, **options)
            return forward.unpack_dual(out).tangent

    exact = tangent(lambda *given, **rest: reference.attention(*given, **rest)[0])
    torch.testing.assert_close(tangent(regard.attention), exact)


def test_so_does_that_of_a_policys_parameters():
    q, k, v = heads(2, 2, 4, 3)
    forward = torch.autograd.forward_ad
    policy = regard.temperature.QueryDependent(2, 3, dtype=torch.float64)
    begun = policy.bias.detach().clone()
    del policy.bias  # a tensor may stand in its place

    def out(bias, **options):
        policy.bias = bias
        return regard.attention(q, k, v, temperature=policy, normalizer="entmax15", **options)

    with forward.dual_level():
        moved = forward.make_dual(begun, torch.ones_like(begun))
        tangents = [forward.unpack_dual(out(moved, **options)).tangent for options in ({}, {"backend": "cpu"})]
    step = 1e-6
    slope = (out(begun + step) - out(begun - step)) / (2 * step)
    for tangent in tangents:
        torch.testing.assert_close(tangent, slope, atol=1e-8, rtol=1e-6)


def test_a_backend_asked_for_by_name_loses_no_tangent_in_silence():
    q, k, v = heads(1, 2, 4, 3)
    for run in (
        lambda x, backend: regard.attention(x, k, v, backend=backend),
        lambda x, backend: regard.attention(q, k, v, temperature=1.0 + x[..., :1].square(), backend=backend),
    ):
        ours, exact = (torch.func.jvp(lambda x: run(x, backend), (q,), (k,)) for backend in ("cpu", "reference"))
        torch.testing.assert_close(ours, exact)
        with pytest.raises(ValueError, match=r"backend 'cpu' cannot compute this call: a torch\.func transform .*vmap"):
            torch.func.vmap(lambda x: torch.func.jvp(lambda x: run(x, "cpu"), (x,), (k,)))(torch.stack([q, q]))


def within_jvp(function, x):
    return torch.func.jvp(function, (x,), (x.cos(),))[1]


def within_grad(function, x):
    return torch.func.grad(lambda x: function(x).square().sum())(x)


SLOW_OPTIONS = [
    pytest.param(options, regard.sparsemax, marks=pytest.mark.slow)  # a bisection of 50 steps takes 17 s to trace
    for options in ({"normalizer": "entmax15"}, {"softcap": 3.0}, {})
]


@pytest.mark.parametrize("transform", [within_jvp, within_grad])
@pytest.mark.parametrize(("options", "normalize"), [({"normalizer": "softmax1"}, regard.softpick), *SLOW_OPTIONS])
def test_a_compiled_transform_is_carried_too(transform, options, normalize):
    q, k, v = heads(1, 2, 4, 3)

    def whole(x):
        return transform(lambda y: regard.attention(y, k, v, **options), x)

    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), whole(q))
    rows = torch.compile(lambda x: transform(normalize, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(rows(q), transform(normalize, q))


def test_a_graph_compiled_outside_of_forward_mode_loses_no_tangent_in_silence():
    q, k, v = heads(1, 2, 4, 3)
    forward = torch.autograd.forward_ad
    for function in (lambda x: regard.attention(x, k, v, normalizer="entmax15"), regard.sparsemax):
        compiled = torch.compile(function, backend="aot_eager")
        assert torch.equal(compiled(q), function(q))
        with forward.dual_level(), pytest.raises(NotImplementedError, match="carry no tangents"):
            compiled(forward.make_dual(q, q.cos()))


@pytest.mark.parametrize("name", ["softmax1", "sparsemax"])
def test_batched_gradients_of_an_eager_call(name):
    q, k, v = qkv(1, 2, 6, 4)
    out = regard.attention(q, k, v, normalizer=name)
    many = torch.stack([torch.ones_like(out), torch.randn_like(out)])
    batched = torch.autograd.grad(out, q, many, is_grads_batched=True, retain_graph=True)[0]
    for one, upstream in zip(batched, many, strict=True):
        assert torch.allclose(one, torch.autograd.grad(out, q, upstream, retain_graph=True)[0], atol=1e-6)


def test_a_statistic_read_without_gradients_keeps_its_own():
    q, k, v = qkv(1, 2, 6, 4)
    _, stats = regard.attention(q, k, v, return_stats=True)
    with torch.no_grad():
        dict(stats)
    assert torch.autograd.grad(stats.entropy.sum(), q)[0].abs().sum() > 0


@pytest.mark.parametrize(
    "options",
    [dict(window=([1], 2)), dict(backend=["cpu"]), dict(return_stats=(["mass"],)), dict(window=(1.0, 0))],
    ids=str,
)
def test_nonsense_is_refused_before_and_after_a_plan(options):
    q, k, v = (x.detach() for x in qkv(1, 2, 6, 4))
    for _ in range(2):
        with pytest.raises(ValueError, match=next(iter(options))):
            regard.attention(q, k, v, **options)
        regard.attention(q, k, v, window=(1, 0))
