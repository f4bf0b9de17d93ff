"""Policies: what they say in numbers, the same on every path, with gradients, inside real models."""

import doctest
import math
import runpy
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from rows_data import FUSED
from torch import nn

import regard
from regard._call.problem import Problem
from regard.nn.validation import SCORES
from regard.temperature import Adaptive, Fixed, Learned, QueryDependent, SSMax
from regard.temperature.named import NAMES, named, unsized
from regard.temperature.rows import visible_keys

HEADS, WIDTH = 4, 5


def make(name: str):
    torch.manual_seed(3)
    policy = {
        "fixed": lambda: Fixed(0.7),
        "learned": lambda: Learned(HEADS, begin=1.3),
        "ssmax": lambda: SSMax(0.5, learn=True),
        "ssmax per head": lambda: SSMax(torch.rand(HEADS) + 0.2, learn=True),
        "published": lambda: Adaptive("published"),
        "refit": Adaptive,
        "query": lambda: QueryDependent(HEADS, WIDTH),
        "function": lambda: lambda visible_keys, rows: 0.5 + rows.q.square().mean(-1),
    }[name]()
    if isinstance(policy, QueryDependent):
        nn.init.normal_(policy.weight)
    return policy.double() if isinstance(policy, nn.Module) else policy


POLICIES = ("fixed", "learned", "ssmax", "ssmax per head", "published", "refit", "query", "function")
OPTIONS = {
    "plain": {},
    "causal, sink": dict(is_causal=True, sink=torch.linspace(-1, 1, HEADS, dtype=torch.float64)),
    "mask, cap": dict(attn_mask=torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.4, softcap=2.0),
    "window, lengths": dict(window=(3, 2), key_lengths=torch.tensor([9, 5])),
    "scale per head": dict(scale=torch.linspace(0.1, 2.0, HEADS, dtype=torch.float64)),
}


def qkv(sharp=1.0):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, HEADS, 9, WIDTH), (2, 2, 9, WIDTH), (2, 2, 9, 3))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [(sharp * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_path_agrees_with_the_reference_in_value_and_gradient(name, options):
    for sharp in (0.3, 3.0):
        q, k, v = qkv(sharp)
        policy = make(name)
        given = dict(temperature=policy, enable_gqa=True, **OPTIONS[options])
        want = regard.reference.attention(q, k, v, **given)[0]
        got = regard.attention(q, k, v, **given)
        leaves = [q, k, v, *(policy.parameters() if isinstance(policy, nn.Module) else ())]
        assert torch.allclose(got, want, atol=1e-10)
        pairs = (torch.autograd.grad(out.cos().sum(), leaves) for out in (got, want))
        for leaf, ours, theirs in zip(leaves, *pairs, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-8), leaf.shape
            assert ours.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}])
def test_a_policy_reads_the_same_queries_however_the_scale_is_written(dtype, tolerance, options):
    """A scale per head multiplies q, or a temperature in 16 bits: neither is the policy's business."""
    q, k, v = (x.detach().to(dtype) for x in qkv())
    given = dict(temperature=make("query"), enable_gqa=True, **options)
    want = regard.attention(q, k, v, scale=-1.7, **given)
    per_head = torch.full((HEADS,), -1.7, dtype=torch.float64)
    found = (regard.attention(q, k, v, scale=per_head, **given),
             regard.reference.attention(q, k, v, scale=per_head, **given)[0])  # fmt: skip
    for out in found:
        assert torch.allclose(out.double(), want.double(), atol=tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.filterwarnings("default")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("name", ["refit", "query"])
def test_the_triton_kernels_agree_too(name):
    policy = make(name).float()
    q, k, v = (x.detach()[:1].float().requires_grad_() for x in qkv())
    given = dict(temperature=policy, enable_gqa=True, is_causal=True)
    got = regard.attention(q, k, v, **given, backend="triton")
    want = regard.reference.attention(q, k, v, **given)[0].float()
    leaves = [q, k, v, *policy.parameters()]
    assert torch.allclose(got, want, atol=1e-5)
    ours, theirs = (torch.autograd.grad(x.cos().sum(), leaves) for x in (got, want))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("normalizer", ["entmax15", "sigmoid", "relu"])
@pytest.mark.parametrize("name", ["ssmax per head", "query", "learned"])
def test_other_normalisers_take_them_too(name, normalizer):
    q, k, v = qkv()
    policy = make(name)
    given = dict(temperature=policy, enable_gqa=True, normalizer=normalizer, is_causal=True)
    out, stats = regard.attention(q, k, v, **given, return_stats=True)
    want, _, dense = regard.reference.attention(q, k, v, **given, return_stats=True)
    assert torch.allclose(out, want, atol=1e-9)
    assert all(torch.allclose(stats[key], dense[key], atol=1e-7) for key in dense)
    leaves = [q, *policy.parameters()]
    ours, theirs = (torch.autograd.grad(x.cos().sum(), leaves) for x in (out, want))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["learned", "ssmax per head", "refit", "query"])
def test_gradcheck(name):
    policy = make(name)
    q, k, v = (x.detach()[:1, :, :4].requires_grad_() for x in qkv())

    def out(*inputs):
        return regard.attention(*inputs[:3], temperature=policy, enable_gqa=True, is_causal=True)

    assert torch.autograd.gradcheck(out, (q, k, v, *policy.parameters()))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("normalizer", FUSED)
def test_temperatures_next_to_zero(normalizer, size):
    """A tensor of temperatures down to 1e-18 gives the reference's weights and finite gradients."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    q = (q * size).requires_grad_()
    for t in (1e-8, 1e-18):
        temperature = torch.tensor([[1.0], [t]])[..., None].requires_grad_()
        out = regard.attention(q, k, v, normalizer=normalizer, temperature=temperature, backend="cpu")
        exact = q.detach().double().requires_grad_()
        truth, _ = regard.reference.attention(exact, k, v, normalizer=normalizer, temperature=temperature.double())
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=3e-6)
        upstream = torch.randn(out.shape, generator=generator)
        own, of_t = torch.autograd.grad(out, (q, temperature), upstream)
        (right,) = torch.autograd.grad(truth, exact, upstream.double())
        if right.abs().max() < 1e30:
            torch.testing.assert_close(own.double(), right, rtol=1e-3, atol=1e-5 * right.abs().max().item() + 1e-30)
            assert of_t.isfinite().all()


@pytest.mark.parametrize("normalizer", FUSED)
def test_hidden_rows_beside_a_temperature_next_to_zero(normalizer):
    """A row whose bias is −inf throughout stays empty beside a row at temperature 1e-18."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = torch.randn(3, 1, 1, 4, 8, generator=generator).unbind()
    mask, temperature = torch.zeros(4, 4), torch.ones(1, 1, 4, 1)
    mask[2], temperature[..., 0, 0] = -math.inf, 1e-18
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    given = dict(normalizer=normalizer, temperature=temperature)
    out = regard.attention(q, k, v, mask, **given, backend="cpu")
    truth, _ = regard.reference.attention(q, k, v, mask, **given)
    assert not out[0, 0, 2].any()
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=3e-6)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_scalable_softmax_as_published():
    """arXiv 2501.19399: one score +3 among −2, s = 0.43."""
    for n, plain, scalable in ((10, 0.943, 0.940), (100, 0.600, 0.9951), (1000, 0.129, 0.9996), (10_000, 0.0146, 1.0)):
        scores = torch.full((1, 1, n, 1), -2.0, dtype=torch.float64)
        scores[..., 0, 0] = 3.0
        q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, n, 1, dtype=torch.float64)
        for temperature, want in ((None, plain), (SSMax(0.43), scalable)):
            _, stats = regard.attention(q, scores, v, scale=1.0, temperature=temperature, return_stats=("max_weight",))
            assert stats.max_weight.item() == pytest.approx(want, abs=6e-4)


def test_the_published_polynomial_switches_off_and_the_refit_does_not():
    def beta(policy, h):
        return 1.0 / policy(None, lambda names: {"entropy": torch.tensor([h], dtype=torch.float64)}).item()

    published, refit = Adaptive("published"), Adaptive()
    assert beta(published, 5.9) > 1.0 and beta(published, 5.95) == 1.0
    assert beta(published, 2.0) == pytest.approx(-0.037 * 16 + 0.481 * 8 - 2.3 * 4 + 4.917 * 2 - 1.791)
    values = [beta(refit, h) for h in (0.2, 0.5, 0.51, 1.0, 4.0, 6.0, 9.0, 12.0)]
    assert values[:2] == [1.0, 1.0] and values[2] == pytest.approx(1.0, abs=0.01)  # no jump at the floor
    assert sorted(set(values)) == values[1:]


def test_the_refit_is_near_the_best_of_its_script():
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "figures" / "adaptive.py"))
    drawn = script["sample"](seed=5, longest=10, keys=2**16, at_least=64)
    h, fitted = drawn[0], Adaptive.refit[0]
    betas = (script["line"](script["slope"](drawn), h), script["line"](fitted, h), script["published"](h), 0 * h + 1)
    best, ours, published, none = (script["mean_loss"](drawn, beta) for beta in betas)
    assert best < ours < 1.1 * best  # the best slope for rows up to 65536 keys is near the best for rows up to 1024
    assert ours < 0.9 * published < 0.9 * none


def test_ssmax_stays_positive_wherever_its_s_goes():
    policy = SSMax(0.4, learn=True)
    for s in (-3.0, 0.0, 1e-9):
        with torch.no_grad():
            policy.s.fill_(s)
        t = policy(torch.tensor([[[1.0, 7.0]]]), None)
        assert (t > 0).all() and t.isfinite().all()


@pytest.mark.parametrize("word", ["ssmax", "adaptive"])
def test_words_inside_a_model_by_using(word):
    model, x = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0), torch.randn(2, 5, 16)
    outs = []
    for temperature in (word, unsized(word)):
        with regard.using(model, temperature=temperature):
            outs.append(model(x))
    assert torch.equal(*outs) and not torch.allclose(outs[0], model(x))


@pytest.mark.parametrize("name", ["learned", "query", "ssmax per head", "refit"])
def test_inside_a_model_by_using(name):
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model, policy = Plain(), make(name)
    q, k, v = qkv()
    with regard.using(model, temperature=policy):
        out = model(q, k, v)
    want = regard.reference.attention(q, k, v, is_causal=True, enable_gqa=True, temperature=policy)[0]
    assert torch.allclose(out, want, atol=1e-10)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters())


def test_qk_norm_inside_a_model_by_using():
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = qkv(30.0)
    model = Plain()
    with regard.using(model, qk_norm=True):
        out = model(q, k, v)
    normed = regard.nn.qk_norm(q, k)
    assert torch.allclose(out, regard.reference.attention(*normed, v, enable_gqa=True)[0], atol=1e-10)


def test_a_policy_that_asks_nothing_leaves_torchs_path():
    q, k, v = (x.detach() for x in qkv())
    path = regard.attention_path
    assert path(q, k, v, enable_gqa=True, temperature=Fixed(2.0)).backend == "torch"
    assert "temperature" in path(q, k, v, enable_gqa=True, temperature=Learned(HEADS)).reason


def test_compiled_whole():
    q, k, v = (x.detach().float() for x in qkv())
    for policy in (Learned(HEADS), SSMax(), QueryDependent(HEADS, WIDTH)):

        def run(q, k, v, policy=policy):
            return regard.attention(q, k, v, enable_gqa=True, is_causal=True, temperature=policy)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(q, k, v), run(q, k, v), atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: SSMax(-1.0), ValueError, "s must be a positive"),
        (lambda: SSMax(math.inf), ValueError, "s must be"),
        (lambda: SSMax("a"), TypeError, "s must be a positive number .* got 'a'"),
        (lambda: SSMax(True), TypeError, "s must be a positive number"),
        (lambda: unsized("ssmaxx"), ValueError, "did you mean 'ssmax'"),
        (lambda: regard.using(nn.Linear(2, 2), temperature="learned"), ValueError, r"Learned\(heads\)"),
        (lambda: Fixed(0.0), ValueError, "value"),
        (lambda: Fixed("warm"), ValueError, "value"),
        (lambda: Learned(0), ValueError, "heads"),
        (lambda: Learned(2, begin=-1.0), ValueError, "begin"),
        (lambda: Learned(2, begin=None), ValueError, "begin must be"),
        (lambda: QueryDependent(2, 0), ValueError, "head_dim"),
        (lambda: Adaptive("refitted"), ValueError, "'refit', 'published'"),
        (lambda: Adaptive(()), ValueError, "coefficient"),
        (lambda: Adaptive(3.0), TypeError, "fit must be"),
        (lambda: Adaptive(["one"]), TypeError, "fit must be"),
        (lambda: Adaptive(floor="low"), ValueError, "floor must be"),
        (lambda: Adaptive(floor=-1.0), ValueError, "floor"),
        (lambda: named("ssmaxx", 2, 4), ValueError, "did you mean 'ssmax'"),
        (lambda: regard.attention(*qkv(), enable_gqa=True, temperature=Learned(3)), ValueError, "broadcast"),
        (lambda: regard.attention(*qkv(), enable_gqa=True, temperature=QueryDependent(4, 7)), ValueError, "head_dim=7"),
        (lambda: regard.attention(*qkv(), enable_gqa=True, temperature=lambda n, rows: 2.0), TypeError, "function"),
        (
            lambda: regard.attention(*qkv(), enable_gqa=True, temperature=lambda n, rows: torch.ones(3)),
            ValueError,
            r"broadcast to \(B, H, M\) = \(2, 4, 9\)",
        ),
        (
            lambda: regard.attention(*qkv(), enable_gqa=True, temperature=lambda n, rows: 3.0 - n),
            ValueError,
            "positive numbers, got -[0-9]",
        ),
    ],
)
def test_nonsense_is_named(call, error, word):
    with pytest.raises(error, match=word):
        call()


def test_qk_norm_of_zeros_and_of_huge_tokens():
    x = torch.randn(1, 2, 5, 8)
    x[:, :, 1] = 0.0
    x = x.requires_grad_()
    q, k = regard.nn.qk_norm(x, 3.0 * x)
    mask = torch.tensor([True, False, True, True, True])
    regard.attention(q, k, x, mask)[:, :, 2:].square().sum().backward()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(regard.nn.qk_norm(1e15 * x, x)[0], q, rtol=1e-5, atol=1e-6)
    small = torch.full((4,), 1e-6)  # as large as eps: over √(eps² + eps²)
    torch.testing.assert_close(regard.nn.qk_norm(small, small)[0], torch.full((4,), math.sqrt(0.5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_qk_norm_bounds_the_logits_and_is_the_modules_cosine(dtype):
    q, k, v = (1e3 * x.detach().to(dtype) for x in qkv())
    normed = regard.nn.qk_norm(q, k)
    _, stats = regard.attention(*normed, v, enable_gqa=True, return_stats=("max_logit",))
    assert stats.max_logit.max() <= math.sqrt(WIDTH) * (1 + 2 * torch.finfo(dtype).eps)
    cosine = nn.functional.cosine_similarity(
        q.double()[:, :, :, None], k.double().repeat_interleave(2, 1)[:, :, None], -1
    )
    assert torch.allclose(stats.max_logit.double(), math.sqrt(WIDTH) * cosine.amax(-1), rtol=4 * torch.finfo(dtype).eps)


def test_the_examples_of_the_guide_run():
    guide = Path(__file__).parents[2] / "docs" / "remedies.md"
    failed, tried = doctest.testfile(str(guide), module_relative=False)
    assert failed == 0 and tried >= 6


@pytest.mark.parametrize("hiding", ["order", "mask", "bias"])
@pytest.mark.parametrize(("first_query", "first_key"), [(0, 0), (40, 0), (300, 70)])
def test_keys_are_counted_over_more_queries_than_a_block(hiding, first_query, first_key):
    """Causal order, a window and lengths count positions of the whole sequence, of which q and k may be pieces."""
    torch.manual_seed(0)
    batch, queries, keys, lengths = 2, 600, 90, torch.tensor([85, 150])
    q, k = torch.randn(batch, 1, queries, 4), torch.randn(batch, 1, keys, 4)
    shown = torch.rand(batch, 1, queries, keys) < 0.5
    problem = Problem(
        q, k, k, regard.normalizers.get("softmax"), 1.0, causal=True, left=200, key_lengths=lengths,
        first_query=first_query, first_key=first_key,
        mask=shown if hiding == "mask" else None,
        bias=torch.zeros(shown.shape).masked_fill(~shown, -math.inf) if hiding == "bias" else None,
    )  # fmt: skip
    i, j = torch.arange(queries)[:, None] + first_query, torch.arange(keys) + first_key
    seen = (j <= i) & (j >= i - 200) & (j < lengths[:, None, None, None])
    wanted = (seen if hiding == "order" else seen & shown).sum(-1)
    assert torch.equal(visible_keys(problem), wanted.float())


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_can_be_made_on_meta_and_filled_later(name):
    with torch.device("meta"):
        empty = regard.nn.MultiheadAttention(8, 2, temperature=name)
    assert repr(empty.temperature)
    filled = regard.nn.MultiheadAttention(8, 2, temperature=name)
    empty.to_empty(device="cpu").load_state_dict(filled.state_dict())
    x = torch.randn(1, 4, 8)
    assert torch.equal(empty(x), filled(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
@pytest.mark.parametrize("theta", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
def test_a_learned_temperature_stays_positive_and_finite(theta, score, dtype):
    layer = regard.nn.MultiheadAttention(8, 2, score=score, temperature="learned", dtype=dtype)
    nn.init.constant_(layer.temperature.log_temperature, theta)
    out = layer(torch.randn(2, 5, 8, dtype=dtype), is_causal=True)
    out.float().sum().backward()
    assert bool(out.isfinite().all()) and bool(layer.temperature.log_temperature.grad.isfinite().all())


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
def test_parameters_that_are_nan_show_in_the_loss(name, score):
    layer = regard.nn.MultiheadAttention(8, 2, score=score, temperature=name)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, math.nan)
    assert layer(torch.randn(2, 5, 8), is_causal=True).sum().isnan()
    with pytest.raises(ValueError, match="positive and finite"):
        regard.attention(*torch.randn(3, 1, 2, 5, 4), temperature=torch.tensor(math.nan))


@pytest.mark.parametrize("score", SCORES)
def test_ssmax_for_other_heads_is_named(score):
    layer = regard.nn.MultiheadAttention(8, 2, score=score, temperature=SSMax(torch.ones(4)))
    with pytest.raises(ValueError, match="SSMax with s of 4 heads got queries of 2"):
        layer(torch.randn(1, 5, 8))


@pytest.mark.parametrize("number", [10**400, Fraction(1, 2), -1], ids=["int", "fraction", "negative"])
def test_a_policy_refuses_numbers_that_no_float_holds_by_name(number):
    for made, name in ((regard.temperature.Fixed, "value"), (SSMax, "s"), (partial(Learned, 2), "begin")):
        for device in ("cpu", "meta"):
            with torch.device(device), pytest.raises(ValueError, match=f"^{name} must be a positive"):
                made(number)
    for name in ("temperature", "softcap"):
        with pytest.raises(ValueError, match=r"must be a positive|must lie between|must be None, a number"):
            regard.nn.MultiheadAttention(8, 2, **{name: number})


def test_counts_that_a_policy_writes_to_are_its_own():
    """They are kept for the layers of a model."""
    q, k, v = (x.detach()[:1, :1] for x in qkv())
    seen = []

    class Writes:
        def __call__(self, visible_keys, rows):
            seen.append(visible_keys.clone())
            return visible_keys.fill_(2.0)

    for _ in range(2):
        regard.attention(q, k, v, is_causal=True, temperature=Writes())
    assert torch.equal(*seen) and seen[0].unique().numel() > 1


def test_counts_of_visible_keys_are_kept_of_plain_calls_alone():
    from regard.temperature import rows

    rows._count_once.cache_clear()
    q, options = torch.randn(1, 2, 7, 4), dict(is_causal=True, temperature=SSMax())
    torch.func.grad(lambda x: regard.attention(x, q, q, **options).sum())(q)
    assert rows._count_once.cache_info().currsize == 0
    regard.attention(q, q, q, **options)
    assert rows._count_once.cache_info().currsize == 1
