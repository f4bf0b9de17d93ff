"""The statistics: their definitions, their merge laws, and their accuracy where the naive formulas cancel."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_data import rows

import regard
from regard import normalizers, statistics
from regard.cpu import attention_kernels
from regard.health import bins
from regard.health.page import data
from regard.normalizers import Normalizer, Pointwise, Ratio
from regard.normalizers._language import jit, tl
from regard.parallel import mixture, plan
from regard.problem import Problem
from regard.statistics import State, of_scores, of_weights, solve_frame


def by_definition(s, visible, choice, i):
    """One row, from the table in the docs, with no care for rounding: float64 and moderate logits only."""
    j = visible.nonzero().squeeze(-1)
    s, p = s[j], choice.reference(s, visible, choice.theta)[j]
    share = p / p.sum() if p.sum() > 0 else p * 0
    jacobian = torch.autograd.functional.jacobian(lambda x: choice.reference(x, None, choice.theta), s)
    return dict(
        visible_keys=len(j),
        max_logit=s.max(),
        mean_logit=s.mean(),
        logit_variance=((s - s.mean()) ** 2).mean(),
        logsumexp=torch.logsumexp(torch.cat([s, s.new_zeros(1)]) if choice.name == "softmax1" else s, 0),
        mass=p.sum(),
        entropy=-torch.xlogy(share, share).sum(),
        effective_keys=torch.exp(-torch.xlogy(share, share).sum()) if p.sum() > 0 else 0.0,
        participation=1 / (share**2).sum() if p.sum() > 0 else 0.0,
        max_weight=p.max(),
        support=(p > 0).sum(),
        distance=(share * (i - j).abs()).sum(),
        first_key_mass=share[0],
        gradient_gain=jacobian.diagonal().sum(),
    )


@pytest.mark.parametrize("name", [*normalizers.names(), "entmax(alpha=1.3)", "sigmoid(bias=-2)"])
def test_every_statistic_is_its_definition(name):
    choice = normalizers.get(name)
    generator = torch.Generator().manual_seed(4)
    s = torch.randn(6, 11, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 1, 3, 1, 1, 1])[:, None]
    s[4] = s[4].round()
    s[5] = -s[5].abs()
    visible = torch.rand(6, 11, generator=generator) > 0.3
    stats = of_scores(s, visible, name)
    assert tuple(stats) == statistics.NAMES
    for i in range(6):
        defined = by_definition(s[i], visible[i], choice, i)
        assert set(defined) == set(stats)
        for key, want in defined.items():
            assert float(stats[key][i]) == pytest.approx(float(want), rel=1e-8, abs=1e-10), key


@jit
def square(e, s, c):
    return s * s


@jit
def square_slope(e, s, c):
    return 2.0 * s


@jit
def below(s, theta):
    return 1.0 / (1.0 + tl.exp(s))


@jit
def below_slope(s, theta):
    return -below(s, theta) * (1.0 - below(s, theta))


def squares(s, visible, theta):
    u = s**2 if visible is None else (s**2).masked_fill(~visible, 0.0)
    return u / u.sum(-1, keepdim=True).clamp_min(1e-300)


def falling(s, visible, theta):
    return torch.sigmoid(-s) if visible is None else torch.sigmoid(-s).masked_fill(~visible, 0.0)


def best_two(s, visible, theta):
    s = s if visible is None else s.masked_fill(~visible, -math.inf)
    s = s.masked_fill(s < s.topk(min(2, s.shape[-1]), -1).values[..., -1:], -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0)


ABOUT = dict(name="somebodys", formula="", sums_to="", sparse=True, paper="")


@pytest.mark.parametrize(
    "record",
    [
        Ratio(**ABOUT, reference=squares, numerator=square, numerator_slope=square_slope, shift="none"),
        Pointwise(**ABOUT, reference=falling, value=below, slope=below_slope),
        Normalizer(**ABOUT, reference=best_two, fused=False),
    ],
    ids=["falls and rises", "falls", "reference only"],
)
def test_statistics_of_maps_whose_sums_do_not_tell_them(record, monkeypatch):
    monkeypatch.setitem(normalizers._members, "somebodys", record)
    choice = normalizers.get("somebodys")
    generator = torch.Generator().manual_seed(5)
    s = 2.0 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    s[0] = -s[0].abs()
    s[0, 3] = 0.0
    visible = torch.rand(5, 7, generator=generator) > 0.2
    q, k = torch.eye(5, dtype=torch.float64)[None, None], s.mT[None, None]
    v = torch.randn(1, 1, 7, 3, generator=generator, dtype=torch.float64)
    options = dict(attn_mask=visible, scale=1.0, normalizer="somebodys", return_stats=True)
    told = [of_scores(s, visible, "somebodys")]
    for backend in ("cpu", "reference") if record.family == "pointwise" else ("reference",):  # a ratio takes compiling
        stats = regard.attention(q, k, v, **options, backend=backend)[1]
        told.append({name: x[0, 0] for name, x in stats.items()})
    for i in range(5):
        for key, want in by_definition(s[i], visible[i], choice, i).items():
            for stats in told:
                assert float(stats[key][i]) == pytest.approx(float(want), rel=1e-8, abs=1e-10), key
    if record.fused:
        problem = Problem(q, k, v, choice, 1.0, stats=("entropy",))
        with pytest.raises(ValueError, match="cannot be merged over ranks"):
            plan.choose(problem, None)


def test_every_statistic_stands_in_every_table():
    """One that was forgotten would be made of sums that nobody gathered, or be missing from reports without a word."""
    known = set(statistics.NAMES)
    assert set(attention_kernels.MADE_OF) == known
    assert set(bins.LAYOUT) == set(data.MEANING) == known | {"entropy_ratio", "gain_ratio"}


@pytest.mark.parametrize("name", normalizers.names())
def test_of_weights_agrees_with_of_scores(name):
    choice = normalizers.get(name)
    s = rows(12)[[0, 1, 2, 3, 7, 8]]
    p = choice.reference(s, None, choice.theta)
    want = of_scores(s, None, name)
    for given_scores in (s, None):
        got = of_weights(p, given_scores, name, visible=torch.ones_like(s, dtype=torch.bool))
        for key in got:
            assert torch.allclose(got[key], want[key], rtol=1e-6, atol=1e-9), key
    assert set(of_weights(p, s, name)) == set(statistics.NAMES)


@given(seed=st.integers(0, 10_000), name=st.sampled_from(normalizers.names()), size=st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=60, deadline=None)
def test_states_merge_over_any_split(seed, name, size):
    generator = torch.Generator().manual_seed(seed)
    choice = normalizers.get(name)
    s = size * torch.randn(4, 24, generator=generator, dtype=torch.float64)
    s[1] = s[1].round()
    visible = torch.rand(4, 24, generator=generator) > 0.4
    visible[3] = False
    sink = torch.randn(4, 1, generator=generator, dtype=torch.float64) if name in ("softmax", "softmax1") else None
    position = torch.arange(4.0, dtype=torch.float64)[:, None]
    whole = of_scores(s, visible, name, sink=sink)
    frame = solve_frame(s, visible, choice)
    owner = torch.randint(0, 4, (24,), generator=generator)
    parts = []
    for part in range(4):
        at = (owner == part).nonzero().squeeze(-1)
        own = frame if choice.family == "threshold" else solve_frame(s[:, at], visible[:, at], choice)
        parts.append(State.of(s[:, at], visible[:, at], choice, own, position, at.double()))
    merged = parts[0].merge(parts[1], choice).merge(parts[3].merge(parts[2], choice), choice).finish(choice, sink)
    for key in whole:
        assert torch.allclose(merged[key], whole[key], rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("name", [name for name in normalizers.names() if normalizers.get(name).family == "ratio"])
def test_parts_whose_maxima_lie_far_apart_merge(name):
    choice = normalizers.get(name)
    s = torch.tensor([[2000.0, 1999.0, -1500.0, 3.0, 2.0, -1.0]], dtype=torch.float64)
    seen, at = torch.ones_like(s, dtype=torch.bool), torch.arange(6.0, dtype=torch.float64)
    parts = []
    for own in (slice(0, 2), slice(2, 6)):
        frame = solve_frame(s[:, own], seen[:, own], choice)
        parts.append(State.of(s[:, own], seen[:, own], choice, frame, at[:1, None], at[own]))
    whole = of_scores(s, normalizer=name)
    for one, two in (parts, parts[::-1]):
        for key, x in one.merge(two, choice).finish(choice).items():
            torch.testing.assert_close(x, whole[key], rtol=1e-9, atol=1e-12, msg=key)


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
@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-12, 1 + 1e-7, 1.0001, 1.004, 8.0, 32.0])
def test_entmax_of_any_alpha_in_attention_and_its_statistics(alpha, dtype):
    """τ is too coarse to tell the weights of α next to 1 or far beyond 2 by it; ties share alike at any α."""
    name, bound = f"entmax(alpha={alpha!r})", {torch.float32: 2e-6, torch.float64: 1e-10}[dtype]
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


@pytest.mark.parametrize(
    "name", ["sparsemax", "entmax15", "entmax(alpha=1.25)", "entmax(alpha=3)", "softpick", "softmax1"]
)
def test_the_gradients_of_scores_statistics_are_theirs(name):
    """τ moves with the scores: held still, it gave the threshold maps' entropies another gradient."""
    z = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    for key in ("entropy", "participation", "distance", "gradient_gain"):
        assert torch.autograd.gradcheck(lambda z, key=key: of_scores(z, hidden, name)[key], (z,)), key


def test_statistics_are_a_tree_to_torch():
    q = torch.randn(3, 1, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    _, mapped = torch.func.vmap(lambda x: regard.attention(x, x, x, normalizer="entmax15", return_stats=True))(q)
    _, alone = regard.attention(q[1], q[1], q[1], normalizer="entmax15", return_stats=True)
    assert isinstance(mapped, statistics.Statistics) and list(mapped) == list(alone)
    assert torch.allclose(mapped.entropy[1], alone.entropy)


def test_a_row_without_visible_keys():
    stats = of_scores(torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    for name, x in stats.items():
        assert (x == (-math.inf if name in ("max_logit", "logsumexp") else 0.0)).all(), name
    assert of_scores(torch.randn(2, 0))["entropy"].tolist() == [0.0, 0.0]


def test_the_notes_functions():
    w = torch.softmax(torch.randn(5, 5, dtype=torch.float64), -1)
    stats = of_weights(w)
    note_entropy = -(w * torch.log(w + 1e-12)).sum(-1)
    i = torch.arange(5.0, dtype=torch.float64)
    assert torch.allclose(stats.entropy, note_entropy, atol=1e-9)
    assert torch.allclose(stats.distance, (w * (i[:, None] - i).abs()).sum(-1))


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="'entropy'"):
        statistics.resolve(("entrpy",))
    with pytest.raises(AttributeError, match="entropy"):
        _ = of_scores(torch.zeros(1, 2)).nothing
    with pytest.raises(TypeError, match="weights"):
        of_weights(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="scores"):
        of_weights(torch.zeros(2, 2), torch.zeros(2, 3))


def test_a_tuple_names_what_comes_back():
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    _, stats = regard.attention(q, k, v, return_stats=("gradient_gain", "entropy"), backend="reference")
    assert tuple(stats) == ("entropy", "gradient_gain")


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


def test_of_weights_can_be_differentiated_through_zeros_and_counts_in_float32():
    w = torch.tensor([[1.0, 0.0], [0.3, 0.7]], requires_grad=True)
    of_weights(w).entropy.sum().backward()
    assert w.grad.isfinite().all()
    far = torch.zeros(1, 600, dtype=torch.bfloat16)
    far[0, 599] = 1.0
    assert of_weights(far).distance.item() == 599.0


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


def test_of_weights_with_a_nan_says_nan():
    stats = statistics.of_weights(torch.tensor([[math.nan, 0.5, 0.5], [0.2, 0.3, 0.5]]))
    for name, x in stats.items():
        assert x[1].isfinite(), name
        assert x[0] == 3 if name == "visible_keys" else x[0].isnan(), name


def test_of_weights_alone_every_positive_weight_is_a_visible_key():
    stats = of_weights(torch.tensor([[0.0, 0.25, 0.0, 0.75]]))
    assert stats["visible_keys"].item() == 2 and stats["first_key_mass"].item() == 0.25
    shown = of_weights(torch.tensor([[0.0, 0.25, 0.0, 0.75]]), visible=torch.ones(1, 4, dtype=torch.bool))
    assert shown["visible_keys"].item() == 4 and shown["first_key_mass"].item() == 0.0


def test_of_weights_beside_their_scores_minus_infinity_is_hidden():
    scores = torch.tensor([[-math.inf, 1.0, 0.0, -math.inf]])
    for visible in (None, torch.ones(1, 4, dtype=torch.bool)):
        stats = of_weights(torch.softmax(scores, -1), scores, visible=visible)
        assert stats["visible_keys"].item() == 2 and stats["support"].item() == 2
        assert stats["first_key_mass"].item() == pytest.approx(math.e / (1 + math.e))


@pytest.mark.parametrize("name", normalizers.names())
def test_of_weights_that_are_all_zero_nothing_is_nan(name):
    stats = of_weights(torch.zeros(2, 3), normalizer=name, visible=torch.ones(2, 3, dtype=torch.bool))
    for key, x in stats.items():
        counts = key == "visible_keys" or (key == "support" and not normalizers.get(name).sparse)
        assert (x == (3.0 if counts else 0.0)).all(), key


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


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_parts_that_an_engine_finished_mix_to_the_row(name):
    s = 3.0 * torch.randn(4, 12, dtype=torch.float64)
    here = (torch.arange(12) < 5).expand_as(s)
    whole, parts = of_scores(s, normalizer=name), [of_scores(s, seen, name) for seen in (here, ~here)]
    pointwise = name == "sigmoid"
    weigh = (lambda part: part.mass) if pointwise else (lambda part: torch.exp(part.logsumexp))
    first, second = (mixture.started(part, at) for part, at in zip(parts, (0, 5), strict=True))
    mixed = mixture.mixed(first, second, *map(weigh, parts), pointwise)
    m, silent = whole.max_logit, None if pointwise else torch.zeros(4, dtype=torch.float64)
    found = mixture.finished(mixed, statistics.NAMES, m, torch.exp(whole.logsumexp - m), silent)
    for statistic in statistics.NAMES:
        torch.testing.assert_close(found[statistic], whole[statistic], msg=statistic)
