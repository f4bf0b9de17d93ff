"""The statistics are their definitions, for every map, also one whose sums do not tell them, and go by their names."""

import math

import pytest
import torch
from squares import normalizer as squares

import regard
from regard import normalizers, statistics
from regard._backends.cpu.attention import kernels as attention_kernels
from regard._call.problem import Problem
from regard.health.measure import histogram
from regard.health.report.page import payload
from regard.normalizers import Normalizer, Pointwise, jit, tl
from regard.parallel import plan, reference_rows
from regard.statistics import of_scores, of_weights


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
def below(s, theta):
    return 1.0 / (1.0 + tl.exp(s))


@jit
def below_slope(s, theta):
    return -below(s, theta) * (1.0 - below(s, theta))


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
        squares,
        Pointwise(**ABOUT, reference=falling, value=below, slope=below_slope),
        Normalizer(**ABOUT, reference=best_two, fused=False),
    ],
    ids=["falls and rises", "falls", "reference only"],
)
def test_statistics_of_maps_whose_sums_do_not_tell_them(record, monkeypatch):
    monkeypatch.setitem(normalizers._members, record.name, record)
    choice = normalizers.get(record.name)
    generator = torch.Generator().manual_seed(5)
    s = 2.0 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    s[0] = -s[0].abs()
    s[0, 3] = 0.0
    visible = torch.rand(5, 7, generator=generator) > 0.2
    q, k = torch.eye(5, dtype=torch.float64)[None, None], s.mT[None, None]
    v = torch.randn(1, 1, 7, 3, generator=generator, dtype=torch.float64)
    options = dict(attn_mask=visible, scale=1.0, normalizer=record.name, return_stats=True)
    told = [of_scores(s, visible, record.name)]
    for backend in ("cpu", "reference") if record.family == "pointwise" else ("reference",):  # a ratio takes compiling
        stats = regard.attention(q, k, v, **options, backend=backend)[1]
        told.append({name: x[0, 0] for name, x in stats.items()})
    for i in range(5):
        for key, want in by_definition(s[i], visible[i], choice, i).items():
            for stats in told:
                assert float(stats[key][i]) == pytest.approx(float(want), rel=1e-8, abs=1e-10), key
    if record.fused:
        problem = Problem(q, k, v, choice, 1.0, stats=("entropy",))
        assert plan.choose_engine(problem, None) == (None, reference_rows)


def test_every_statistic_stands_in_every_table():
    """One that was forgotten would be made of sums that nobody gathered, or be missing from reports without a word."""
    known = set(statistics.NAMES)
    assert set(attention_kernels.REQUIRED_SUMS) == known
    assert set(histogram.LAYOUT) == set(payload.STATISTICS) == known | {"entropy_ratio", "gain_ratio"}


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


@pytest.mark.parametrize("names", [(), [], set()])
def test_no_names_bring_no_statistics(names):
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    for backend in (None, "cpu", "reference"):
        out, stats = regard.attention(q, k, v, return_stats=names, backend=backend)
        assert stats == {} and torch.allclose(out, regard.attention(q, k, v), atol=1e-6)
    assert regard.reference.attention(q, k, v, return_stats=names)[2] == {}
    for score in ("scaled_dot", "additive"):
        layer = regard.nn.MultiheadAttention(8, 2, score=score)
        assert layer(q[0], return_stats=names)[1] == {}


@pytest.mark.parametrize("name", regard.normalizers.names())
def test_top_key_is_the_index_of_the_largest_weight(name):
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, 40, 8, generator=g) for _ in range(3))
    q[0] *= 8.0  # sharp rows beside flat ones
    options = dict(is_causal=True, normalizer=name, window=(12, 0), softcap=20.0)
    out, stats = regard.attention(q, k, v, return_stats=("entropy", "top_key"), **options)
    expected, weights = regard.reference.attention(q, k, v, **options)
    at = stats.top_key.long()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.gather(-1, at[..., None])[..., 0], weights.amax(-1))
    rows = torch.arange(40)
    assert bool(((at <= rows) & (at >= rows - 12)).all())  # a visible one, even if no key has weight
    assert list(stats) == ["entropy", "top_key"]
    assert "top_key" not in regard.attention(q, k, v, return_stats=True)[1]


def test_top_key_of_ties_empty_rows_and_nan():
    scores = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [math.nan, 0.0, 1.0]])
    top = statistics.of_scores(scores, names=("top_key",)).top_key
    assert top[:2].tolist() == [1.0, 0.0] and bool(top[2].isnan())
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    assert statistics.of_scores(scores[:2], hidden, names=("top_key",)).top_key.tolist() == [0.0, 0.0]


def test_top_key_is_refused_where_nothing_computes_it():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="'cpu' cannot compute this call: the statistic top_key"):
        regard.attention(q, q, q, return_stats="top_key", backend="cpu")
    assert "top_key" in regard.attention_path(q, q, q, return_stats="top_key").reason
