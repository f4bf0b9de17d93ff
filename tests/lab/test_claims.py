"""The lab: the rule, the intervals, and verdicts that follow from numbers and not from the seed."""

import importlib
import json
import math
import re
from itertools import count, pairwise

import pytest
import regard_lab as lab
import torch
from regard_lab import estimate
from regard_lab.claim import NOTES, Finding, Sampler, Undecided, above, below, near
from regard_lab.estimate import Estimate, exact
from regard_lab.figure import INK, Figure
from regard_lab.mathml import formula_line, mathml
from regard_lab.run import claims

import regard

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seeds", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", lab.names())
def test_another_seed_gives_the_same_verdict(name, seeds):
    assert len({lab.run(name, seed).verdict for seed in range(seeds)}) == 1


@pytest.mark.parametrize("name", lab.names())
def test_a_claim_says_everything(name):
    claim = claims()[name]
    assert claim.statement and claim.rule and set(claim.note.split(", ")) <= set(NOTES)
    assert 1 <= len(claim.derivation) <= 3
    for formula in claim.derivation:
        assert "<merror" not in formula_line(formula) and ">\\" not in formula_line(formula)  # unknown commands
    result = lab.run(name)
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert record["verdict"] in ("holds", "holds_if", "wrong")
    assert bool(record["condition"]) == (record["verdict"] == "holds_if")
    assert bool(record["right"]) == (record["verdict"] == "wrong")
    low, high = record["interval"]
    assert low <= record["measured"] <= high
    figure = result.finding.figure
    assert len(figure.alt) > 20


@pytest.mark.parametrize(
    ("latex", "drawn"),
    [
        ("[-1, 1]", '[</mo><mo form="prefix">&#x02212;</mo><mn>1'),
        ("x = -2", '<mo>&#x0003D;</mo><mo form="prefix">&#x02212;</mo><mn>2'),
        ("(x) - 2", "<mo>&#x02212;</mo><mn>2"),
        (r"-0.4 \pm 0.1", "<mn>0.4</mn><mo>&#x000B1;</mo><mn>0.1</mn>"),
        (r"a \iff b", "<mo>&#x027FA;</mo>"),
        (r"\sim 2", '<mo form="infix">&#x0223C;</mo><mn>2</mn>'),
        (r"\ln 10", '<mi>ln</mi><mspace width="0.167em" /><mn>10</mn>'),
    ],
)
def test_signs_and_relations_have_their_own_space(latex, drawn):
    assert drawn in mathml(latex)


# Verdicts that arithmetic alone settles, worked out here without the library.
def weights(*scores):
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


@pytest.mark.parametrize(
    ("name", "verdict", "measured"),
    [
        ("e24", "holds", math.exp(24)),
        ("worked-example", "holds", -0.35 - 0.12 + 1.08),
        ("unscaled-example", "holds", weights(-24, -10, 0, 10, 24)[-1]),
        ("scaled-example", "wrong", weights(-3, -1, 0, 1, 3)[-1]),
        ("healthy-gradient", "wrong", weights(-3, -1, 0, 1, 3)[0] * (1 - weights(-3, -1, 0, 1, 3)[0])),
        ("raw-to-weights", "wrong", weights(2.1, 0.5, -1.2, 3.0)[0]),
        ("collapse-example", "wrong", weights(10, 0.1, 0.1, 0.1)[1]),
        ("table3-row-b", "wrong", 25.4 - 25.8),
        ("grades", "wrong", 24590 / 111110),
        ("sum-over-d", "wrong", 64),
        ("clipping-cures-vanishing", "wrong", 1.0),
    ],
)
def test_verdicts_that_arithmetic_settles(name, verdict, measured):
    result = lab.run(name)
    assert result.verdict == verdict
    assert result.measured == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "power-order",
        "relu-weights",
        "mask-minus-1e9",
        "standard-normal",
        "smaller-d-sharper",
        "qk-norm",
        "causal-and-padding",
        "shift-invariance",
        "range",
    ],
)
def test_conditional_claims_name_their_condition(name):
    result = lab.run(name)
    assert result.verdict == "holds_if" and len(result.condition) > 5


@pytest.mark.parametrize(
    ("name", "truth", "verdict"),
    [
        ("scaled-example", {"CLAIMED": weights(-3, -1, 0, 1, 3)}, "holds"),
        ("raw-to-weights", {"CLAIMED": [weights(2.1, 0.5, -1.2, 3.0), weights(1.8, -0.3, 2.5, 0.1)]}, "holds"),
        ("unscaled-example", {"CLAIMED": [0.2] * 5}, "wrong"),
        ("table3-row-b", {"PUBLISHED": {64: 25.0, 32: 25.4, 16: 25.0}}, "holds"),
        ("entropy-table", {"UNSCALED": [0.75, 0.34, 0.17], "SCALED": [1.93, 1.93, 1.93]}, "holds"),
    ],
)
def test_the_verdict_follows_from_the_numbers(monkeypatch, name, truth, verdict):
    module = importlib.import_module(claims()[name].measure.__module__)
    for field, value in truth.items():
        monkeypatch.setattr(module, field, value)
    assert lab.run(name).verdict == verdict


def test_a_broken_softmax_is_noticed(monkeypatch):
    monkeypatch.setattr(regard, "softmax", lambda z, *arguments, **options: torch.sigmoid(z))
    assert lab.run("shift-invariance").verdict == "wrong"
    assert lab.run("probability").verdict == "wrong"


@pytest.mark.parametrize(("name", "call"), [("probability", 1), ("power-order", 1), ("sharper-with-k", 3)])
def test_a_few_counterexamples_refute_what_is_said_of_all(monkeypatch, name, call):
    true, calls = regard.softmax, count(1)

    def flat(z, *arguments, **options):
        """The first four rows of one call are uniform, whatever their scores."""
        w = true(z, *arguments, **options)
        return torch.cat([torch.full_like(w[:4], 1 / w.shape[-1]), w[4:]]) if next(calls) == call else w

    monkeypatch.setattr(regard, "softmax", flat)
    assert lab.run(name).verdict == "wrong"


def test_seeds_matter_and_repeat():
    first = lab.run("dot-variance", 1).measured
    assert lab.run("dot-variance", 2).measured != first
    lab.run("dot-mean", 1)
    assert lab.run("dot-variance", 1).measured == first
    assert not torch.equal(Sampler(0, "a").normal(4), Sampler(0, "b").normal(4))


def test_ticks_are_numbers_that_somebody_chose():
    def ticks(*x):
        return Figure("lines", "x", "y", {"a": (x, x)}, log="x").spec()["layer"][0]["encoding"]["x"]["axis"]

    assert ticks(16.0, 256.0, 16384.0)["values"] == [16.0, 256.0, 16384.0]
    assert ticks(1e-7, 0.05, 1.0)["values"] == [1e-7, 0.05, 1.0]
    assert "values" not in ticks(2.5726e-14, 2.286e-7, 0.21563)  # Vega's own then


def test_the_fall_of_the_unscaled_gradient_is_the_one_derived():
    right = lab.run("gradient-norm").right
    medians, dims = (
        [float(x) for x in text.split(", ")] for text in re.search(r"\((.*) at d_k = (.*)\)", right).groups()
    )
    for median, d in zip(medians, dims, strict=True):  # √d·e^(−γ√d), γ ≈ 0.4
        assert -math.log(median / d**0.5) / d**0.5 == pytest.approx(0.4, abs=0.1)
    assert r"\gamma \approx 0.4" in " ".join(claims()["gradient-norm"].derivation)


def test_points_that_a_claim_is_about_are_not_joined_by_a_curve():
    layers = lab.run("variance-scale-figure").finding.figure.spec()["layer"]
    drawn = {
        name: layer["mark"]["type"] for layer in layers for name in {row["name"] for row in layer["data"]["values"]}
    }
    assert drawn == {"spline, as drawn but unclipped": "line", "exp(s·x − lse)": "line", "the 15 points": "point"}


def test_groups_of_points_differ_by_shape_as_well():
    (layer,) = lab.run("sharpness-vs-quality").finding.figure.spec()["layer"]
    scale = layer["encoding"]["shape"]["scale"]
    assert len(set(scale["range"])) == len(scale["range"]) >= len(scale["domain"]) == 6


def test_the_name_of_a_line_can_be_read_on_a_bar():
    bars, rule, halo, words = lab.run("healthy-gradient").finding.figure.spec()["layer"]
    assert bars["mark"]["type"] == "bar" and rule["mark"]["type"] == "rule"
    assert halo["mark"]["stroke"] == "white" and halo["encoding"] == words["encoding"]
    assert words["mark"]["color"] == INK and "stroke" not in words["mark"]


def test_the_rule():
    right, off = near("x", 1.0, exact(1.0), 0.1), near("x", 1.0, exact(2.0), 0.1)
    assert Finding([right], None).verdict == "holds"
    assert Finding([right, right.beyond()], None, condition="c").verdict == "holds"
    assert Finding([right, off.beyond()], None, condition="c").verdict == "holds_if"
    assert Finding([off, right.beyond()], None, condition="c").verdict == "wrong"
    with pytest.raises(Undecided, match="no condition"):
        _ = Finding([right, off.beyond()], None).verdict
    with pytest.raises(Undecided, match="derivation is off"):
        _ = Finding([right, off.ours()], None).verdict
    with pytest.raises(Undecided, match="of the claim itself"):
        _ = Finding([off.beyond()], None, condition="c").verdict


def test_an_interval_that_straddles_decides_nothing():
    wide = Estimate(1.0, 0.5, 1.5)
    with pytest.raises(Undecided, match="neither"):
        _ = near("x", 1.0, wide, 0.1).agrees
    assert near("x", 1.0, wide, 0.5).agrees and above("x", 0.4, wide).agrees and not below("x", 0.4, wide).agrees
    assert not above("x", 1.0, exact(1.0)).agrees and not below("x", 1.0, exact(1.0)).agrees


def test_intervals_cover_the_truth():
    draw = torch.Generator().manual_seed(0)
    missed = 0
    for _ in range(200):
        x = torch.randn(400, generator=draw)
        for found, truth in (
            (estimate.mean(x), 0.0),
            (estimate.mean(x.square()), 1.0),
            (estimate.share(x > 0), 0.5),
            (estimate.quantile(x, 0.5), 0.0),
            (estimate.quantile(x, 0.8), 0.8416),
        ):
            missed += not found.low <= truth <= found.high
    assert missed <= 3  # 1000 intervals of 99.99 %
    few = estimate.mean(torch.tensor([-1.0, 1.0] * 3))  # six samples: Student's t of 5 degrees, 11.2
    assert few.high == pytest.approx(11.178 * math.sqrt(6 / 5) / math.sqrt(6), rel=1e-3)
    assert estimate.share(torch.zeros(100, dtype=torch.bool)).high > 0.05  # none seen is not none
    x = [1.0, 2.0, 4.0, 8.0]
    y = torch.stack([v**1.5 * (1 + 0.1 * torch.randn(500, generator=draw)) for v in x])
    slope = estimate.exponent(x, y)
    assert slope.low < 1.5 < slope.high and slope.high - slope.low < 0.1
    a, b = Estimate(4.0, 3.0, 5.0), Estimate(2.0, 1.0, 3.0)
    assert estimate.ratio(a, b) == Estimate(2.0, 1.0, 5.0)
    assert estimate.difference(a, b).high == pytest.approx(2.0 + math.sqrt(2))
    with pytest.raises(ValueError, match="too few"):
        estimate.quantile(torch.randn(10), 0.5)


def test_intervals_are_no_wider_than_they_must_be():
    """Wilson's ends solve (p − p̂)² = Z²·p(1 − p)/n, here of 7 in 20; a quantile's lie Z·√(n q (1 − q)) ranks off."""
    share = estimate.share(torch.arange(20) < 7)
    for p in (share.low, share.high):
        assert (p - 0.35) ** 2 == pytest.approx(estimate.Z**2 * p * (1 - p) / 20)
    assert share.low < share.value < share.high
    for q in (0.2, 0.5):
        half = estimate.Z * math.sqrt(10_001 * q * (1 - q))
        found = estimate.quantile(torch.arange(10_001.0), q)
        assert found.value == round(10_000 * q)
        assert (found.low, found.high) == (math.floor(10_001 * q - half), math.ceil(10_001 * q + half))


def test_what_a_claim_allows_in_words():
    one = exact(1.0)
    assert [check.allowed for check in (near("x", 0.5, one, 0.1), above("x", 0.01, one), below("x", 2.0, one))] == [
        "0.5 ± 0.1",
        "> 0.01",
        "< 2",
    ]


def test_unknown_claims_are_named():
    with pytest.raises(ValueError, match="did you mean 'dot-variance'"):
        lab.run("dot-varianze")
    with pytest.raises(ValueError, match="seed"):
        lab.run("e24", seed=-1)


def test_claims_stand_in_the_order_of_the_notes():
    notes = [claim.note[:3] for claim in claims().values()]
    assert all(a <= b for a, b in pairwise(notes))


def test_a_share_of_nothing_has_an_interval_all_the_same():
    assert estimate.share(torch.zeros(100, dtype=torch.bool)).high == pytest.approx(
        estimate.Z**2 / (100 + estimate.Z**2)
    )
