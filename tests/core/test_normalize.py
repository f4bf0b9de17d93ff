"""Rows as people call them: limits, gradients in temperature and alpha, exactness, samplers, nonsense."""

import math

import pytest
import torch
from rows_data import rows

import regard
from regard import normalizers
from regard.normalizers import jit, tl

KNOWN = torch.tensor([-2.0, 0.0, 0.5])
ONES = torch.ones(2)
RAGGED = torch.nested.nested_tensor([ONES, ONES[:1]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (regard.softmax, [0.0486, 0.3592, 0.5922]),
        (regard.sparsemax, [0.0, 0.25, 0.75]),
        (regard.entmax15, [0.0, 0.3260, 0.6740]),
        (lambda z: regard.entmax(z, 1.5), [0.0, 0.3260, 0.6740]),
        (lambda z: regard.entmax(z, 2), [0.0, 0.25, 0.75]),
        (lambda z: regard.entmax(z, 1), [0.0486, 0.3592, 0.5922]),
    ],
)
def test_published_vectors(function, expected):
    assert torch.allclose(function(KNOWN), torch.tensor(expected), atol=5e-5)


def test_float32_softmax_is_no_less_exact_than_torchs():
    for scale in (0.01, 1.0, 10.0, 100.0):
        z = scale * torch.randn(64, 2000, generator=torch.Generator().manual_seed(7))
        exact = torch.softmax(z.double(), -1)
        ours = (regard.softmax(z).double() - exact).abs()
        torchs = (torch.softmax(z, -1).double() - exact).abs()
        assert ours.max() <= torchs.max() * 1.0 + 1e-12
        assert ours.mean() <= torchs.mean() * 1.05


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax(alpha=1.25)", "entmax(alpha=1.75)"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("n", [3, 1000, 1_000_000])
def test_threshold_rows_sum_to_one(name, size, n):
    z = size * torch.randn(2, n, generator=torch.Generator().manual_seed(n))
    p = regard.normalize(z, name)
    assert ((p.double().sum(-1) - 1).abs() <= 2e-6).all()
    if size > 1 and n > 3:
        assert (p == 0).any()


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "entmax"])
def test_temperature_limits(name):
    z = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    assert torch.equal(regard.normalize(z, name, temperature=0), torch.tensor([[0, 0.5, 0.5], [1, 0, 0]]))
    assert torch.allclose(regard.normalize(z, name, temperature=math.inf), torch.full((2, 3), 1 / 3))
    mask = torch.tensor([True, False, True])
    assert torch.equal(regard.normalize(z, name, temperature=0, mask=mask), torch.tensor([[0, 0, 1.0], [1, 0, 0]]))
    half = torch.tensor([[0.5, 0, 0.5]] * 2)
    assert torch.allclose(regard.normalize(z, name, temperature=math.inf, mask=mask), half)


@pytest.mark.parametrize("name", [*normalizers.names(), "sigmoid(bias=-2)"])
def test_limits_are_limits(name):
    z = rows(9)[[0, 1, 3, 7, 8]]
    near_zero = normalizers.get(name).reference(z / 1e-5, None, normalizers.get(name).theta)
    assert torch.allclose(regard.normalize(z, name, temperature=0), near_zero, atol=1e-4)
    near_inf = normalizers.get(name).reference(z / 1e7, None, normalizers.get(name).theta)
    assert torch.allclose(regard.normalize(z, name, temperature=math.inf), near_inf, atol=1e-4)


@jit
def cubic(e, s, c):
    return tl.maximum(s, 0.0) * tl.maximum(s, 0.0) * tl.maximum(s, 0.0)


@jit
def cubic_slope(e, s, c):
    return 3.0 * tl.maximum(s, 0.0) * tl.maximum(s, 0.0)


@jit
def softsign(s, theta):
    return 0.5 + 0.5 * s / (1.0 + tl.abs(s))


@jit
def softsign_slope(s, theta):
    return 0.5 / ((1.0 + tl.abs(s)) * (1.0 + tl.abs(s)))


def somebodys(family, tiles, weights):
    """A record as another's file may have it: nothing but the mathematics."""

    def reference(scores, visible, theta):
        p = weights(scores)
        return p if visible is None else p.masked_fill(~visible, 0.0)

    about = dict(name="somebodys", formula="", sums_to="", sparse=False, paper="", reference=reference)
    return family(**about, **tiles)


@pytest.mark.parametrize(
    "record",
    [
        somebodys(
            normalizers.Ratio,
            dict(numerator=cubic, numerator_slope=cubic_slope, shift="none"),
            lambda s: s.clamp_min(0) ** 3 / (s.clamp_min(0) ** 3).sum(-1, keepdim=True).clamp_min(1e-300),
        ),
        somebodys(
            normalizers.Pointwise, dict(value=softsign, slope=softsign_slope), lambda s: 0.5 + 0.5 * s / (1.0 + s.abs())
        ),
    ],
    ids=["cubic", "softsign"],
)
def test_the_limits_of_a_map_of_somebody_elses(record, monkeypatch):
    monkeypatch.setitem(normalizers._members, "somebodys", record)
    z = torch.tensor([[1.0, 2.0, -3.0, 0.0]], dtype=torch.float64)
    for limit, near in ((0.0, 1e-9), (math.inf, 1e9)):
        p = regard.normalize(z, "somebodys", temperature=limit)
        torch.testing.assert_close(p, regard.normalize(z, "somebodys", temperature=near), rtol=0, atol=1e-8)
        slopes = regard.jacobian(z - 0.5, "somebodys", limit)
        torch.testing.assert_close(slopes, regard.jacobian(z - 0.5, "somebodys", near), rtol=0, atol=1e-8)


def test_a_temperature_per_row_mixes_limits_and_numbers():
    z = torch.randn(4, 5, requires_grad=True)
    t = torch.tensor([[0.0], [1.0], [math.inf], [2.0]], requires_grad=True)
    p = regard.softmax(z, temperature=t)
    assert torch.allclose(p[1], torch.softmax(z[1], -1)) and torch.allclose(p[3], torch.softmax(z[3] / 2, -1))
    assert p[0].max() == 1 and torch.allclose(p[2], torch.full((5,), 0.2))
    p.pow(2).sum().backward()
    assert z.grad.isfinite().all() and t.grad.isfinite().all()
    assert (z.grad[[0, 2]] == 0).all() and (t.grad[[0, 2]] == 0).all() and (t.grad[[1, 3]] != 0).all()


def test_alpha_per_row_and_its_gradient():
    z = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    alpha = torch.tensor([[1.0], [1.2], [1.5], [1.9], [2.0]], dtype=torch.float64)
    p = regard.entmax(z, alpha)
    for row, a in enumerate((1.0, 1.2, 1.5, 1.9, 2.0)):
        assert torch.allclose(p[row], regard.entmax(z[row], a), atol=1e-9)
    inner = alpha[1:4].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z, a: regard.entmax(z, a), (z.detach()[1:4].requires_grad_(), inner))
    at_one = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    dp = torch.randn(1, 7, dtype=torch.float64)
    got = torch.autograd.grad(regard.entmax(z[:1].detach(), at_one), at_one, dp)[0]
    step = 1e-4
    rise = (regard.entmax(z[:1].detach(), 1 + step) - regard.entmax(z[:1].detach(), 1.0)) / step
    assert torch.allclose(got.squeeze(), (rise * dp).sum(), atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_short_alpha_means_what_a_long_one_means(dtype):
    """bfloat16 knows no number between 1 and 1.0078: a bound of 1.001 is 1 there."""
    z = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
    alpha = torch.tensor([[1.0], [1.1], [1.5], [2.0]]).to(dtype)
    assert torch.allclose(regard.entmax(z, alpha), regard.entmax(z, alpha.double()), atol=1e-6)
    assert torch.allclose(regard.entmax(z, alpha)[0], regard.softmax(z[0]), atol=1e-6)
    alpha.requires_grad_()
    assert torch.autograd.grad(regard.entmax(z, alpha).cos().sum(), alpha)[0].dtype == dtype


def test_the_closed_gradient_in_alpha_at_one_is_the_limit_from_above():
    z, dp = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    h, soft = 1e-3, torch.softmax(z, -1)
    rise = (4.0 * regard.entmax(z, 1.0 + h) - 3.0 * soft - regard.entmax(z, 1.0 + 2.0 * h)) / (2.0 * h)
    closed = normalizers.get("entmax").parameter_vjp(soft, dp, torch.ones(4, 1, dtype=torch.float64))
    torch.testing.assert_close(closed, (rise * dp).sum(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("alpha", [1.01, 1.05, 1.3])
def test_alpha_near_one_stays_exact(alpha):
    z = 5 * torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    exact = normalizers.get("entmax").reference(z.double(), None, alpha)
    assert (regard.entmax(z, alpha).double() - exact).abs().max() < 2e-6


def test_log_softmax_and_logsumexp():
    z = 20 * torch.randn(3, 8, dtype=torch.float64)
    assert torch.allclose(regard.log_softmax(z, temperature=2.0), torch.log(regard.softmax(z, temperature=2.0)))
    assert torch.allclose(regard.logsumexp(z, dim=0), torch.logsumexp(z, 0))
    assert torch.allclose(z / 3 - regard.logsumexp(z, temperature=3.0)[:, None], regard.log_softmax(z, temperature=3.0))


def test_gumbel_softmax_maps_with_either_randomness():
    z = torch.zeros(3, 50)
    for randomness in ("same", "different"):
        p = torch.func.vmap(lambda x: regard.gumbel_softmax(x, 0.5), randomness=randomness)(z)
        assert torch.equal(p[0], p[1]) == (randomness == "same")


def test_blocks_of_a_row_that_saw_nothing_have_no_gradient():
    z = torch.tensor([[-math.inf, -math.inf], [1.0, 2.0]], requires_grad=True)
    online = regard.OnlineSoftmax().update(z[:, :1]).update(z[:, 1:])
    (ds,) = torch.autograd.grad(online.logsumexp[1] + online.weights(z).sum(), z)
    assert torch.allclose(ds, torch.tensor([[0.0, 0.0], [0.2689, 0.7311]]), atol=1e-4)


@pytest.mark.parametrize("t", [0.0, math.inf])
def test_empty_rows_have_a_graph_at_the_limits_too(t):
    z = torch.empty(2, 0, requires_grad=True)
    regard.softmax(z, temperature=t).sum().backward()
    assert z.grad.shape == (2, 0)


def test_gumbel_softmax():
    z = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 3)

    def draw(seed, **kw):
        return regard.gumbel_softmax(z, 0.7, generator=torch.Generator().manual_seed(seed), **kw)

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    hard = draw(0, hard=True)
    assert torch.equal(hard.sum(-1), torch.ones(20000)) and set(hard.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(hard.argmax(-1), draw(0).argmax(-1))
    assert torch.allclose(hard.mean(0), torch.softmax(z[0], -1), atol=0.02)
    w = z[:4].clone().requires_grad_()
    soft_grad = torch.autograd.grad(
        regard.gumbel_softmax(w, 0.7, generator=torch.Generator().manual_seed(3))[:, 0].sum(), w
    )[0]
    hard_grad = torch.autograd.grad(
        regard.gumbel_softmax(w, 0.7, hard=True, generator=torch.Generator().manual_seed(3))[:, 0].sum(), w
    )[0]
    assert torch.equal(soft_grad, hard_grad) and (soft_grad != 0).any()


def test_a_soft_sample_is_the_softmax_of_noisy_scores_over_the_temperature():
    """One generator state is one noise: T·log(p_i/p_0) is (z + g)_i − (z + g)_0, whatever T is."""
    z = torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.float64).expand(50, 4)

    def noisy(t, **kw):
        p = regard.gumbel_softmax(z, t, generator=torch.Generator().manual_seed(5), **kw)
        return t * (p / p[:, :1]).log()

    given = torch.empty_like(z).exponential_(generator=torch.Generator().manual_seed(5)).log().neg() + z
    for t in (0.3, 1.0, 4.0):
        assert torch.allclose(noisy(t), given - given[:, :1])
    assert torch.equal(noisy(2.0), noisy(2.0, hard=False))


def test_online_softmax_in_any_order_and_tree():
    generator = torch.Generator().manual_seed(0)
    z = rows(60)
    for _ in range(20):
        cuts = torch.randint(0, 61, (6,), generator=generator).sort().values.tolist()
        blocks = [z[:, a:b] for a, b in zip([0, *cuts], [*cuts, 60], strict=True)]
        order = torch.randperm(len(blocks), generator=generator).tolist()
        parts = [regard.OnlineSoftmax().update(blocks[i]) for i in order]
        while len(parts) > 1:
            at = int(torch.randint(0, len(parts) - 1, (1,), generator=generator))
            parts[at : at + 2] = [parts[at].merge(parts[at + 1])]
        whole = parts[0]
        assert torch.allclose(torch.cat([whole.weights(b) for b in blocks], -1), torch.softmax(z, -1), atol=1e-14)
        assert torch.allclose(whole.logsumexp, torch.logsumexp(z, -1), rtol=1e-14)
        assert torch.equal(whole.max, z.amax(-1))


def test_online_softmax_of_many_small_blocks():
    z = torch.randn(5, 4000, generator=torch.Generator().manual_seed(4))
    online = regard.OnlineSoftmax()
    for block in z.split(1, -1):
        online.update(block)
    assert online.logsumexp.dtype == torch.float32
    total = torch.exp(z.double() - z.double().amax(-1, keepdim=True)).sum(-1)
    assert torch.allclose(online.sum, total, rtol=1e-12)


def test_online_softmax_of_infinite_rows():
    z = torch.tensor([[math.inf, 1.0], [math.nan, math.inf], [-math.inf, -math.inf], [1.0, 2.0]])
    blocks = regard.OnlineSoftmax().update(z[:, :1]).update(z[:, 1:])
    torch.testing.assert_close(blocks.logsumexp, torch.logsumexp(z, -1), equal_nan=True)


def test_online_softmax_of_nothing():
    nothing = regard.OnlineSoftmax().update(torch.full((2, 3), -math.inf)).update(torch.empty(2, 0))
    assert torch.equal(nothing.weights(torch.full((2, 3), -math.inf)), torch.zeros(2, 3))
    assert (nothing.logsumexp == -math.inf).all()
    with pytest.raises(ValueError, match="update"):
        _ = regard.OnlineSoftmax().logsumexp


def test_softmax_backward_is_the_gradient():
    z = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    p, g = torch.softmax(z, -1), torch.randn(3, 5, dtype=torch.float64)
    want, p = torch.autograd.grad(p, z, g)[0], p.detach()
    assert torch.allclose(regard.softmax_backward(g, p), want)
    compiled = torch.compile(regard.softmax_backward, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(g, p), want)
    assert compiled(g.float(), p).dtype == regard.softmax_backward(g.float(), p).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_as_torchs_softmax(dtype):
    z = torch.randn(3, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.softmax(z).dtype == torch.softmax(z, -1).dtype
        assert regard.entmax15(z).dtype == torch.softmax(z, -1).dtype


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: regard.softmax(torch.zeros(3), dim=1), ValueError, "dim"),
        (lambda: regard.softmax(torch.zeros(3, dtype=torch.int64)), TypeError, "float"),
        (lambda: regard.softmax([1.0, 2.0]), TypeError, "Tensor"),
        (lambda: regard.normalize(torch.zeros(3), "sparsemx"), ValueError, "sparsemax"),
        (lambda: regard.normalize(torch.zeros(3), "entmax(alpha=0.5)"), ValueError, "alpha"),
        (lambda: regard.normalize(torch.zeros(3), "entmax(alpha=nan)"), ValueError, "alpha"),
        (lambda: regard.entmax(torch.zeros(3), 0.9), ValueError, "alpha"),
        (lambda: regard.entmax(torch.zeros(3), 33.0), ValueError, r"alpha must lie in \[1, 32\], got 33"),
        (lambda: regard.entmax(torch.zeros(2, 3), torch.tensor([[0.5], [1.5]])), ValueError, "alpha"),
        (lambda: regard.entmax(torch.zeros(2, 3), torch.tensor([1.5, 1.5, 1.5, 1.5])), ValueError, "alpha"),
        (lambda: regard.normalize(torch.zeros(3), mask=torch.zeros(3)), TypeError, "mask"),
        (lambda: regard.normalize(torch.zeros(3), mask=torch.zeros(4, dtype=torch.bool)), ValueError, "mask"),
        (lambda: regard.softmax(torch.zeros(3), temperature=-1.0), ValueError, "temperature"),
        (lambda: regard.softmax(torch.zeros(3), temperature=math.nan), ValueError, "temperature"),
        (lambda: regard.softmax(torch.zeros(3), temperature=torch.tensor([-1.0])), ValueError, "temperature"),
        (lambda: regard.softmax(torch.zeros(3), temperature=torch.tensor([math.nan])), ValueError, "temperature"),
        (lambda: regard.softmax(torch.zeros(3), temperature="hot"), TypeError, "temperature"),
        (lambda: regard.normalize(torch.zeros(3), backend="gpu"), ValueError, "backend"),
        (lambda: regard.vjp(torch.zeros(3), torch.zeros(4)), ValueError, "grad"),
    ],
)
def test_nonsense_is_named(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
def test_forward_mode_and_nested_transforms_are_exact():
    z = torch.randn(4, dtype=torch.float64)
    for name in ("softmax", "entmax15", "softpick"):
        forward = torch.func.jacfwd(lambda x, name=name: regard.normalize(x, name))(z)
        assert torch.allclose(forward, regard.jacobian(z, name), atol=1e-9)
    rows_ = torch.randn(3, 4, dtype=torch.float64)
    mapped = torch.func.vmap(torch.func.grad(lambda x: regard.entmax15(x).square().sum()))(rows_)
    w = rows_.clone().requires_grad_()
    assert torch.allclose(mapped, torch.autograd.grad(regard.entmax15(w).square().sum(), w)[0], atol=1e-9)


def test_alpha_per_row_compiles_and_maps_to_the_same():
    z, alpha = torch.randn(3, 6), torch.tensor([[1.0], [1.5], [2.0]])
    want = regard.entmax(z, alpha)
    compiled = torch.compile(regard.entmax, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(z, alpha), want, atol=1e-6)
    assert torch.allclose(torch.func.vmap(regard.entmax)(z, alpha), want, atol=1e-6)


def test_a_tensor_temperature_keeps_dtype_and_range():
    z = torch.tensor([[60000.0, 59000.0, 1.0]]).half()
    p = regard.softmax(z, temperature=torch.tensor([[0.5]]))
    assert p.dtype == torch.float16 and torch.equal(p, torch.tensor([[1.0, 0.0, 0.0]]).half())
    assert torch.equal(regard.softmax(torch.tensor([0.0, 1.0, 1.0]), temperature=1e-19), torch.tensor([0.0, 0.5, 0.5]))


@pytest.mark.parametrize("name", normalizers.names())
def test_the_reference_backend_poisons_rows_alike(name):
    z = torch.tensor([[math.inf, 1.0, 2.0], [0.0, math.nan, 1.0], [0.0, 1.0, 2.0]])
    ours, oracle = regard.normalize(z, name), regard.normalize(z, name, backend="reference")
    assert oracle[:2].isnan().all() and ours[:2].isnan().all()
    assert torch.allclose(ours[2], oracle[2], atol=1e-6)
    assert regard.normalize(torch.zeros(3, 0), name, temperature=0).shape == (3, 0)
    assert regard.normalize(torch.zeros(3, 0), name, backend="reference").shape == (3, 0)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: regard.softmax(torch.tensor([1, 2])), TypeError, "z must be float64"),
        (lambda: regard.sparsemax(torch.ones(2).to(torch.float8_e4m3fn)), TypeError, "z must be float64"),
        (lambda: regard.softmax_backward([1.0], torch.ones(1)), TypeError, "grad_output must be"),
        (lambda: regard.softmax_backward(torch.ones(1), 1.0), TypeError, "softmax_output must be"),
        (lambda: regard.OnlineSoftmax().update(torch.ones(2)).merge(3), TypeError, "other must be"),
        (lambda: regard.OnlineSoftmax().update(torch.ones(2)).weights([1.0]), TypeError, "block must be"),
        (lambda: regard.OnlineSoftmax().update(ONES).update(ONES.to("meta")), ValueError, "block must be on cpu"),
        (lambda: regard.OnlineSoftmax().update(ONES).weights(ONES.to("meta")), ValueError, "block must be on cpu"),
        (lambda: regard.sigmoid_norm(ONES, bias=ONES.to_sparse()), TypeError, "bias must be a dense tensor"),
        (lambda: regard.entmax(ONES, ONES[:1].to_sparse()), TypeError, "alpha must be a dense tensor"),
        (lambda: regard.softmax(ONES, temperature=RAGGED), TypeError, "temperature must be a dense tensor"),
        (lambda: regard.masks.causal(-1), ValueError, "n must be ≥ 0"),
        (lambda: regard.masks.causal(2.5), TypeError, "n must be an int"),
        (lambda: regard.masks.padding([1.5]), TypeError, "lengths must be integers"),
        (lambda: regard.masks.padding([5], 3), ValueError, "lengths must lie in"),
        (lambda: regard.statistics.of_weights(torch.ones(1, 1), scores=[1]), TypeError, "scores must be"),
        (lambda: regard.statistics.resolve(3), TypeError, "return_stats must be"),
    ],
)
def test_more_nonsense_is_named(call, kind, says):
    with pytest.raises(kind, match=says):
        call()


def test_a_hard_sample_of_nothing_is_nothing():
    z = torch.tensor([[-torch.inf] * 3, [0.0, 1.0, 2.0]])
    assert regard.gumbel_softmax(z, hard=True).sum(-1).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "alpha", [1.0 + 1e-10, torch.full((3, 1), 1.0 + 1e-10, dtype=torch.float64)], ids=["number", "tensor"]
)
def test_alpha_next_to_one_hides_what_softmax_hides(alpha):
    z = torch.tensor(
        [[1.0, -math.inf, 0.5, 7.0], [-math.inf] * 4, [0.0, 2.0, math.nan, -math.inf]], dtype=torch.float64
    )
    mask = torch.tensor([True, True, True, False])
    seen = regard.softmax(z, mask=mask)
    assert seen[0, 3] == 0 and (seen[1] == 0).all() and seen[2].isnan().all()
    for ours, theirs in ((regard.entmax(z, alpha, mask=mask), seen), (regard.entmax(z, alpha), regard.softmax(z))):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.9])
@pytest.mark.parametrize("small", [0.3, 0.02])
def test_entmax_keeps_the_digits_of_small_weights(alpha, small):
    large, gain = 1.0 - small, alpha - 1.0  # p₁^(α−1) − p₂^(α−1) = (α−1)·(s₁ − s₂)
    z = torch.tensor([0.0, (small**gain - large**gain) / gain, -9.0], dtype=torch.float64, requires_grad=True)
    p = regard.entmax(z, alpha)
    want = torch.tensor([large, small, 0.0], dtype=torch.float64)
    torch.testing.assert_close(p, want, rtol=0.0, atol=1e-13)
    slope = 1.0 / (large ** (alpha - 2.0) + small ** (alpha - 2.0))  # g₁·g₂ / (g₁ + g₂)
    row = torch.tensor([slope, -slope, 0.0], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(p[0], z)[0], row, rtol=1e-12, atol=0.0)
    z, name = z.detach(), f"entmax(alpha={alpha})"
    torch.testing.assert_close(regard.jacobian(z, name), torch.stack([row, -row, 0.0 * row]), rtol=1e-12, atol=0.0)
    stats = regard.statistics.of_scores(z, normalizer=name)
    torch.testing.assert_close(stats.gradient_gain, 2.0 * row[0], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(stats.entropy, -torch.special.xlogy(want, want).sum(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.75])
def test_a_weight_next_to_nothing_leaves_the_others_of_entmax_alone(alpha):
    want = torch.tensor([0.6, 0.4, 1e-20], dtype=torch.float64)
    z = want ** (alpha - 1.0) / (alpha - 1.0)
    torch.testing.assert_close(regard.normalize(z, f"entmax(alpha={alpha})", backend="reference"), want)


def test_the_jacobian_of_a_nearly_one_hot_row_keeps_its_digits():
    small = 1.0 / (1.0 + math.exp(30.0))
    want = small * (1.0 - small) * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    ours = regard.jacobian(torch.tensor([30.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(ours, want, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("name", normalizers.names())
def test_minus_zero_is_zero(name):
    for row in ([-0.0], [-0.0, -1.0]):  # found by the fuzz: NaN on the reference
        z = torch.tensor(row, dtype=torch.float64)
        torch.testing.assert_close(regard.normalize(z, name, backend="reference"), regard.normalize(z + 0.0, name))
