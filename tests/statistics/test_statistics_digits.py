"""Statistics keep their digits, and their gradients, where the naive formulas cancel, underflow or overflow."""

import math

import mpmath
import pytest
import torch

import regard
from regard import normalizers, statistics
from regard.statistics import of_scores


def test_nearly_one_hot_rows_keep_their_digits():
    """float32 against 50 digits: 1 − Σp² and lse − E[s] would both be 0."""
    for gap in (20.0, 40.0, 80.0):
        s = torch.tensor([[gap, 0.0, 0.5, -1.0]])
        stats = of_scores(s)
        with mpmath.workdps(50):
            e = [mpmath.e ** mpmath.mpf(float(x)) for x in s[0]]
            p = [x / sum(e) for x in e]
            gain = float(1 - sum(x**2 for x in p))
            entropy = float(-sum(x * mpmath.log(x) for x in p))
        assert float(stats["gradient_gain"][0]) == pytest.approx(gain, rel=1e-5)
        assert float(stats["entropy"][0]) == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-12, 1 + 1e-7, 1.0001, 1.004])
def test_entmax_of_any_alpha_in_attention_and_its_statistics(alpha, dtype):
    """Next to α = 1 the root magnifies the rounding of τ; ties share alike at any α."""
    name, bound = f"entmax(alpha={alpha!r})", {torch.float32: 2e-6, torch.float64: 1e-8}[dtype]
    q, v = torch.ones(1, 1, 1, 1, dtype=dtype), torch.eye(7, dtype=dtype)[None, None]
    k = torch.full((1, 1, 7, 1), 3.0, dtype=dtype)
    out, stats = regard.attention(q, k, v, normalizer=name, return_stats=True)
    want = dict(
        mass=1.0, entropy=math.log(7), max_weight=1 / 7, support=7.0, distance=3.0, gradient_gain=6 * 7 ** (alpha - 2)
    )
    assert torch.allclose(out, torch.full_like(out, 1 / 7), rtol=bound)
    for key, value in want.items():
        assert abs(stats[key].item() / value - 1) < bound, key
    z = torch.full((7,), 3.0, dtype=dtype)
    trace = regard.jacobian(z, name).diagonal().sum().item()
    assert abs(trace / want["gradient_gain"] - 1) < bound
    if alpha < 1.00001:  # the next term of the weights is of the size of α − 1
        k = torch.linspace(-30, 3, 7, dtype=dtype)[None, None, :, None]
        out, stats = regard.attention(q, k, v, normalizer=name, return_stats=True)
        same, soft = regard.attention(q, k, v, return_stats=True)
        assert torch.allclose(out, same, atol=1e-6)
        for key in ("mass", "entropy", "participation", "gradient_gain", "support", "logsumexp", "mean_logit"):
            assert torch.allclose(stats[key], soft[key], rtol=1e-5), key


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax(alpha=1.25)", "softpick", "softmax1"])
def test_the_gradients_of_scores_statistics_are_theirs(name):
    """τ moves with the scores: held still, it gave the threshold maps' entropies another gradient."""
    z = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    for key in ("entropy", "participation", "distance", "gradient_gain"):
        assert torch.autograd.gradcheck(lambda z, key=key: of_scores(z, hidden, name)[key], (z,)), key


@pytest.mark.parametrize("low", [-100.0, -800.0, -1e4])
def test_low_logits_beside_a_sink_keep_their_shape(low):
    """The sink takes all the weight; what the keys share among themselves is still told."""
    s = torch.tensor([[low, low + 1.0, low]])
    plain = of_scores(s)
    for stats in (of_scores(s, None, "softmax1"), of_scores(s, None, "softmax", sink=torch.zeros(1, 1))):
        assert stats["logsumexp"].item() == pytest.approx(0.0, abs=1e-6)
        for name in ("entropy", "participation", "effective_keys", "distance", "first_key_mass"):
            assert torch.allclose(stats[name], plain[name], rtol=1e-5), name
        assert 0.0 <= stats["mass"].item() < 1e-30 and 0.0 <= stats["gradient_gain"].item() < 1e-30


@pytest.mark.parametrize("name", normalizers.names())
@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
def test_gradients_stay_finite_at_any_size(name, size):
    """Weights that underflow, hidden keys beside very low ones, rows of ties: no 0·∞ in backward."""
    torch.manual_seed(1)
    rows = torch.randn(3, 5, 7, dtype=torch.float64) + torch.tensor([-3.0, 0.0, 3.0])[:, None, None]
    rows[:, 0, 3], rows[:, 1] = -math.inf, rows[:, 1, :1]
    s = (size * rows).requires_grad_()
    for told in statistics.of_scores(s, normalizer=name).values():
        if told.requires_grad:
            (gradient,) = torch.autograd.grad(told.sum(), s, retain_graph=True)
            assert gradient.isfinite().all()


@pytest.mark.parametrize("sink", [None, 2.0])
@pytest.mark.parametrize("low", [-1e6, 0.0, 1e6])
def test_gradients_of_large_logits_are_their_formulas(low, sink):
    s = (low + torch.tensor([[0.0, -1.0, -2.5, -1e5, -math.inf]], dtype=torch.float64)).requires_grad_()
    stats = statistics.of_scores(s, sink=sink)
    share = torch.softmax(s.detach(), -1)
    log = torch.log_softmax(s.detach(), -1)
    entropy = -torch.xlogy(share, share).sum()
    expected = -share * torch.where(share > 0, log + entropy, 0.0)
    (gradient,) = torch.autograd.grad(stats.entropy.sum(), s, retain_graph=True)
    assert torch.allclose(gradient, expected, atol=1e-12)
    mass = 1.0 if sink is None else torch.sigmoid(torch.logsumexp(s.detach(), -1) - sink)
    (gradient,) = torch.autograd.grad(stats.logsumexp.sum(), s)
    assert torch.allclose(gradient, share * mass, atol=1e-12)


def test_support_counts_weights_that_underflow():
    """Found by the fuzz: exp(s − max) is 0 in float64 from 745 on, yet the weight is positive."""
    scores = torch.tensor([[2448.0, 1121.0, -3.0, 0.0], [1e-30, 1e-12, 1e-40, -1.0]], dtype=torch.float64)
    for name, count in (("softpick", [2, 3]), ("relu", [2, 3]), ("softmax", [4, 4]), ("sparsemax", [1, 3])):
        assert regard.statistics.of_scores(scores, normalizer=name)["support"].tolist() == count, name


def test_softpick_of_scores_near_zero_is_measured_without_cancellation():
    s = 1e-11 * torch.tensor([[3.0, 1.0, -2.0, 2.0]], dtype=torch.float64)
    grown = torch.expm1(s)
    share = grown.clamp_min(0.0) / grown.clamp_min(0.0).sum()
    found = regard.statistics.of_scores(s, normalizer="softpick")
    assert torch.allclose(found["participation"], 1.0 / share.square().sum(-1), rtol=1e-13)
    assert torch.allclose(found["entropy"], -torch.xlogy(share, share).sum(-1), rtol=1e-13)
    assert torch.allclose(found["mass"], grown.clamp_min(0.0).sum(-1) / grown.abs().sum(-1), rtol=1e-13)


@pytest.mark.parametrize("ties", [1, 2, 3])
@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_the_gain_of_tied_maxima_beside_lesser_keys(name, ties):
    s = torch.tensor([2.0] * ties + [1.5, 0.0], dtype=torch.float64)
    p = regard.normalize(s, name, backend="reference")
    found = regard.statistics.of_scores(s[None], normalizer=name)["gradient_gain"]
    assert torch.allclose(found, (p * (1.0 - p)).sum(), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "entmax(alpha=1.25)"])
def test_scores_of_any_dtype_and_size_are_measured_in_full_precision(name, dtype):
    s = (3.0 * torch.randn(2, 1001, generator=torch.Generator().manual_seed(0)) + 1e4).to(dtype)
    ours, truth = of_scores(s, normalizer=name), of_scores(s.double(), normalizer=name)
    for key in statistics.NAMES:
        assert ours[key].dtype == torch.float32
        torch.testing.assert_close(ours[key], truth[key].float(), rtol=1e-6, atol=0.0)


def test_additive_scores_of_sixteen_bits_have_statistics_in_float32():
    layer = regard.nn.MultiheadAttention(8, 1, score="additive", temperature=regard.temperature.Adaptive()).bfloat16()
    with torch.no_grad():
        out, stats = layer(torch.randn(1, 301, 8).bfloat16(), return_stats=True)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in stats.values()} == {torch.float32}
    assert bool((stats.visible_keys == 301.0).all())


@pytest.mark.parametrize("size", [1e4, 1e12, 1e20])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax(alpha=1.25)"])
def test_threshold_maps_are_measured_at_logits_of_any_size(name, size):
    k = torch.tensor([size, size, 0.0, -size]).reshape(1, 1, 4, 1)
    options = dict(scale=1.0, normalizer=name, return_stats=True)
    want = dict(mass=1.0, max_weight=0.5, entropy=math.log(2.0), participation=2.0, support=2.0, first_key_mass=0.5)
    want |= dict(max_logit=size, mean_logit=size / 4.0, logsumexp=size)
    for backend in ("cpu", "reference"):
        _, stats = regard.attention(torch.ones(1, 1, 1, 1), k, torch.eye(4)[None, None], backend=backend, **options)
        for key, value in want.items():
            torch.testing.assert_close(stats[key], torch.full((1, 1, 1), value), rtol=1e-4, atol=0.0)
