"""A normaliser is one file with one record: it checks itself, says where its parameter serves, travels by its name."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard import normalizers
from regard._call.problem import Problem
from regard.normalizers._language import WORDS, torch_words
from regard.parallel import plan

NAMES = normalizers.names()
NINTH = (Path(__file__).parents[1] / "support" / "squares.py").read_text()


def test_a_ninth_normaliser_is_one_file(tmp_path):
    """Rows, reference, attention, listing and the contract find it, and that of CONTRIBUTING.md, with no other edit."""
    (tmp_path / "squares.py").write_text(NINTH)
    guide = Path(__file__).parents[2] / "CONTRIBUTING.md"
    (tmp_path / "quartic.py").write_text(guide.read_text().split("```python\n")[1].split("```")[0])
    code = """
        import doctest, sys, pytest, regard, torch
        from regard.cli import main
        z = torch.randn(5, 11)
        assert torch.allclose(regard.normalize(z, "squares"), z**2 / (z**2).sum(-1, keepdim=True))
        q, k, v = torch.randn(3, 1, 2, 6, 4)
        out, stats = regard.attention(q, k, v, normalizer="squares", return_stats=True)
        want, weights, dense = regard.reference.attention(q, k, v, normalizer="squares", return_stats=True)
        assert torch.allclose(out, want.float(), atol=1e-5)
        assert all(torch.allclose(stats[n], dense[n].float(), rtol=1e-4, atol=1e-5) for n in dense)
        assert main(["list"]) == 0
        assert doctest.testmod(sys.modules["regard_normalizer_quartic"]) == (0, 2)
        chosen = "squares and (reference and float64 or sum_to or hidden or empty or ties)"
        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", chosen]
        sys.exit(pytest.main([sys.argv[1], *options]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent / "test_contract.py")]
    environment = {**os.environ, "REGARD_NORMALIZERS": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    listed, _, report = done.stdout.partition("\n..")
    assert "\nsquares " in listed and "\nquartic " in listed and " passed" in report and "failed" not in report


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("numerator=numerator, numerator_slope=numerator", "tile slopes"),
        ("numerator=numerator_slope, numerator_slope=numerator_slope", "tiles ≠ reference"),
    ],
)
def test_a_record_checks_its_own_mathematics(tmp_path, broken, complaint):
    right = "    numerator=numerator,\n    numerator_slope=numerator_slope,\n"
    assert right in NINTH
    (tmp_path / "wrong.py").write_text(NINTH.replace(right, f"    {broken},\n").replace('"squares"', '"wrong"'))
    with pytest.raises(ValueError, match=complaint):
        normalizers.discover(tmp_path)
    assert "wrong" not in normalizers.names()


FALLING = """
import torch
from regard.normalizers import Pointwise, jit, tl


def reference(scores, visible, theta):
    p = torch.sigmoid(-scores)
    return p if visible is None else p.masked_fill(~visible, 0.0)


@jit
def value(s, theta):
    return 1.0 / (1.0 + tl.exp(s))


@jit
def slope(s, theta):
    return -tl.exp(s) / ((1.0 + tl.exp(s)) * (1.0 + tl.exp(s)))


@jit
def log_odds(power, theta):
    return RETURNED


normalizer = Pointwise(
    name="falling", formula="σ(−s)", sums_to="n at most", sparse=False, paper="none", reference=reference,
    value=value, slope=slope, log_odds=log_odds,
)
"""


@pytest.mark.parametrize(("odds", "complaint"), [("power", "log_odds rises"), ("2.0 * power", "log_odds ≠ log2")])
def test_odds_tell_the_weights_and_fall_as_scores_rise(tmp_path, odds, complaint):
    (tmp_path / "falling.py").write_text(FALLING.replace("RETURNED", odds))
    with pytest.raises(ValueError, match=complaint):
        normalizers.discover(tmp_path)
    assert "falling" not in normalizers.names()


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_a_record_is_made_where_nothing_is_recorded(quiet):
    """`import regard` in a function that evaluates; a folder of the environment, whose map is first named there."""
    with quiet():
        made = dataclasses.replace(normalizers.get("entmax").normalizer, name="mine")
    assert made.rises and not made.scale_free


def test_a_name_that_is_taken_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("from regard.normalizers.relu import normalizer")
    before = normalizers.get("relu").normalizer
    with pytest.raises(ValueError, match="the name 'relu' is taken"):
        normalizers.discover(tmp_path)
    assert normalizers.get("relu").normalizer is before


def test_a_parameter_says_itself_how_far_the_kernels_go(monkeypatch):
    parameter = normalizers.Parameter("a", default=1.5, low=1.0, high=8.0, fused_high=1.75, softmax_at=1.0)
    mine = dataclasses.replace(normalizers.get("entmax").normalizer, name="mine", parameter=parameter)
    monkeypatch.setitem(normalizers._members, "mine", mine)
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(3))
    for a, backend in ((1.75, "cpu"), (1.8, "reference"), (1.0, "torch")):
        spec = f"mine(a={a})"
        assert regard.attention_path(q, k, v, normalizer=spec).backend == backend
        want, _ = regard.reference.attention(q, k, v, normalizer=f"entmax(alpha={a})")
        torch.testing.assert_close(regard.attention(q, k, v, normalizer=spec), want.float(), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="has no fused form"):
        regard.attention(q, k, v, normalizer="mine(a=1.8)", backend="cpu")
    assert normalizers.get("entmax(alpha=2)").fused
    assert normalizers.get("entmax(alpha=1)").simplest.spec == "softmax"


@pytest.mark.parametrize("a", [1.0, 1.0005, 1.004, 1.05, 1.5])
def test_a_parameter_under_another_name_has_all_the_care_of_entmax(a, monkeypatch):
    """Near α = 1: nothing outside a normaliser's file asks for it by name."""
    entmax = normalizers.get("entmax").normalizer
    renamed = dataclasses.replace(entmax, name="mine", parameter=dataclasses.replace(entmax.parameter, name="a"))
    monkeypatch.setitem(normalizers._members, "mine", renamed)
    mine, theirs = f"mine(a={a})", f"entmax(alpha={a})"
    z, grad = 4.0 * torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(7))
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(8))
    for function in (
        lambda name: regard.normalize(z, name),
        lambda name: regard.vjp(z, grad, name),
        lambda name: regard.jacobian(z, name),
        lambda name: regard.statistics.of_scores(z, normalizer=name)["entropy"],
        lambda name: regard.attention(q, k, v, normalizer=name),
    ):
        assert torch.equal(function(mine), function(theirs))
    paths = [regard.attention_path(q, k, v, normalizer=name).backend for name in (mine, theirs)]
    assert paths[0] == paths[1]


CLIPPED = """
    import torch
    from regard.normalizers import Parameter, Pointwise, jit, sigmoid, tl

    @jit
    def near(b):
        return tl.minimum(tl.maximum(b, -1.0), 1.0)

    @jit
    def value(s, b):
        return 1.0 / (1.0 + tl.exp(-s - near(b)))

    @jit
    def slope(s, b):
        return value(s, b) * (1.0 - value(s, b))

    normalizer = Pointwise(
        name="clipped", formula="", sums_to="", sparse=False, paper="", reference=sigmoid.reference, value=value,
        slope=slope, parameter=Parameter("b", default=0.0, low=-9.0, high=9.0, fused_low=-1.0, fused_high=1.0),
    )
"""


def test_outside_of_its_bounds_nobody_calls_the_tile_functions(tmp_path, monkeypatch):
    """Tiles of sigmoid that serve biases from −1 to 1."""
    for known in ("_members", "_files"):
        monkeypatch.setattr(normalizers, known, dict(getattr(normalizers, known)))
    (tmp_path / "clipped.py").write_text(textwrap.dedent(CLIPPED))
    normalizers.discover(tmp_path)
    z, grad = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(7))
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(8))
    for b, backend in ((-3.0, "reference"), (1.0, "cpu"), (3.0, "reference")):
        mine, theirs = f"clipped(b={b})", f"sigmoid(bias={b})"
        assert regard.attention_path(q, k, v, normalizer=mine).backend == backend
        for function in (
            lambda name: regard.normalize(z, name),
            lambda name: regard.vjp(z, grad, name),
            lambda name: regard.jacobian(z, name),
            lambda name: regard.attention(q, k, v, normalizer=name),
            lambda name: regard.statistics.of_scores(z, normalizer=name)["entropy"],
            lambda name: regard.statistics.of_scores(z, normalizer=name)["gradient_gain"],
        ):
            torch.testing.assert_close(function(mine), function(theirs), rtol=1e-5, atol=1e-6)
        if b != 1.0:
            parts, rows = plan.choose_engine(Problem(q, k, v, normalizers.get(mine), 1.0), None)
            assert parts is None and rows.__name__ == "regard.parallel.reference_rows"


REACH = normalizers.Parameter("alpha", default=2.0, low=1.2, high=2.0, fused_low=2.0)
TILES = ("gain", "value", "slope", "slope_of_weight")


@pytest.mark.parametrize(
    ("changes", "name"),
    [(dict(parameter=REACH), "mine(alpha=1.5)"), (dict(fused=False, **dict.fromkeys(TILES)), "mine")],
    ids=["beyond its tiles", "no tiles"],
)
def test_a_threshold_map_whose_slopes_nobody_tells(changes, name, monkeypatch):
    """entmax with the tiles of sparsemax, which serve α = 2 alone; entmax15 with none."""

    def reference(scores, visible, alpha):
        return normalizers.get("entmax").reference(scores, visible, alpha or 1.5)

    mine = dataclasses.replace(normalizers.get("sparsemax").normalizer, name="mine", reference=reference, **changes)
    monkeypatch.setitem(normalizers._members, "mine", mine)
    z = torch.randn(5, 11, generator=torch.Generator().manual_seed(7))
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(8))
    torch.testing.assert_close(regard.jacobian(z, name), regard.jacobian(z, "entmax15"), rtol=1e-4, atol=1e-6)
    ours, theirs = (regard.attention(q, k, v, normalizer=x, return_stats=True)[1] for x in (name, "entmax15"))
    for statistic in ("entropy", "support", "gradient_gain"):
        torch.testing.assert_close(ours[statistic], theirs[statistic], rtol=1e-4, atol=1e-5)
    assert "gradient_gain" not in regard.statistics.of_weights(regard.normalize(z, name), normalizer=name)


def test_a_ratio_with_a_parameter_which_its_tiles_would_not_hear_of(monkeypatch):
    def sharper(scores, visible, k):
        return normalizers.get("softmax").reference(scores * k, visible, None)

    softmax, parameter = normalizers.get("softmax").normalizer, normalizers.Parameter("k", 1.0, 0.1, 9.0)
    with pytest.raises(ValueError, match="a ratio know no parameter; set fused=False"):
        dataclasses.replace(softmax, name="sharper", reference=sharper, parameter=parameter)
    mine = dataclasses.replace(softmax, name="sharper", reference=sharper, parameter=parameter, fused=False)
    monkeypatch.setitem(normalizers._members, "sharper", mine)
    z = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(regard.normalize(z, "sharper(k=3)"), torch.softmax(3 * z, -1))
    torch.testing.assert_close(regard.jacobian(z, "sharper(k=3)"), 3 * regard.jacobian(3 * z))
    out, stats = regard.attention(q, k, v, normalizer="sharper(k=3)", return_stats=True)
    want, soft = regard.attention(q, k, v, temperature=1 / 3, return_stats=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(stats["entropy"], soft["entropy"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats["gradient_gain"], 3 * soft["gradient_gain"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("word", WORDS)
def test_every_word_takes_a_parameter_alone_beside_scores_and_in_their_place(word):
    """`tl.exp(b)` of a parameter is a number: statistics and Jacobians, which speak torch, failed at it."""
    x, b = torch.tensor([0.5, 2.0], dtype=torch.float64), 1.25
    calls = dict(
        maximum=[(b, 0.5), (x, b), (b, x)], where=[(b > 1, b, 0.5), (b < 1, x, b), (b > 1, x, b), (x > 1, x, b)]
    )
    calls["minimum"] = calls["maximum"]
    for given in calls.get(word, [(b,), (x,)]):
        found = getattr(torch_words, word)(*given)
        numbers = [y.numpy() if isinstance(y, torch.Tensor) else y for y in given]
        assert np.allclose(np.asarray(found), getattr(np, word)(*numbers)), given


def test_the_bounds_of_a_parameter_are_inside():
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(8))
    for alpha, backend in ((1.0049, "reference"), (1.005, "cpu"), (2.0, "cpu"), (2.0001, "reference")):
        assert regard.attention_path(q, k, v, normalizer=f"entmax(alpha={alpha})").backend == backend
    with pytest.raises(ValueError, match=r"alpha must lie in \[1, 32\], got 32.1"):
        normalizers.get("entmax(alpha=32.1)")


def test_a_record_checks_where_its_tiles_serve():
    parameter = normalizers.Parameter("a", 1.5, low=1.0)
    with pytest.raises(ValueError, match=r"fused_low and fused_high, 1\.0 is too far"):
        dataclasses.replace(normalizers.get("entmax").normalizer, parameter=parameter)


def test_a_ratio_that_states_more_than_it_is():
    """exp(s) / 2Σ exp(s), of which attention would have taken the sum for Z."""

    def half(scores, visible, theta):
        return 0.5 * normalizers.get("softmax").reference(scores, visible, theta)

    def twice(e, s, c):
        return e + e

    changes = dict(name="mine", reference=half, denominator=twice, denominator_slope=twice, slope_of_weight=None)
    softmax = normalizers.get("softmax").normalizer
    with pytest.raises(ValueError, match="exponential states that u and v are e"):
        dataclasses.replace(softmax, **changes)
    assert not dataclasses.replace(softmax, **changes, exponential=False).exponential


def test_a_reference_that_fails_beside_its_default_says_where():
    def slower(scores, visible, k):
        return normalizers.get("sigmoid").reference(scores * (1.0 / k), visible, 0.0)

    sigmoid, parameter = normalizers.get("sigmoid").normalizer, normalizers.Parameter("k", default=1.0)
    with pytest.raises(ValueError, match=r"the reference fails .* at k = 0; say by low and high what it is"):
        dataclasses.replace(sigmoid, name="mine", reference=slower, parameter=parameter, fused=False)


def test_a_record_of_ones_own_is_not_taken_for_its_namesake():
    softmax = normalizers.get("softmax").normalizer
    assert normalizers.get(softmax).normalizer is softmax
    for name in ("relu", "mine"):  # a name that is taken, and one that nobody knows
        own = dataclasses.replace(softmax, name=name)
        with pytest.raises(ValueError, match=f"normalizer {name!r}: this record is not the one known by its name"):
            regard.normalize(torch.tensor([1.0, 2.0]), own)


@pytest.mark.parametrize("name", [*NAMES, "entmax(alpha=1.25)"])
def test_a_choice_and_its_record_are_pickled_by_name_and_copied(name):
    """As an attribute of a module that is saved whole, copied for an average of its weights, or sent to a process."""
    choice = normalizers.get(name)
    for twin in (pickle.loads(pickle.dumps(choice)), copy.deepcopy(choice), copy.copy(choice)):
        assert twin == choice and twin.spec == choice.spec and twin.normalizer is choice.normalizer
    assert pickle.loads(pickle.dumps(choice.normalizer)) is choice.normalizer
    own = dataclasses.replace(choice.normalizer, name="mine")
    assert copy.copy(own) is own and copy.deepcopy(own) is own
    with pytest.raises(ValueError, match="is not the one known by its name"):
        pickle.dumps(own)


def test_a_map_whose_default_alone_ignores_a_factor_or_rises_is_told_by_its_parameter(monkeypatch):
    def shifted(scores, visible, b):
        u = (scores - b).clamp_min(0.0) if visible is None else (scores - b).clamp_min(0.0).masked_fill(~visible, 0.0)
        return u / u.sum(-1, keepdim=True).clamp_min(1e-300)

    parameter = normalizers.Parameter("b", default=0.0)
    mine = normalizers.Normalizer("shifted", "", "", True, "", shifted, parameter=parameter, fused=False)
    monkeypatch.setitem(normalizers._members, "shifted", mine)
    z = torch.tensor([[1.5, 4.0, 3.0]])
    want = regard.normalize(z / 2, "shifted(b=1)")
    torch.testing.assert_close(regard.normalize(z, "shifted(b=1)", temperature=2.0), want)
    turning = normalizers.Parameter("k", default=1.0)
    steep = dataclasses.replace(mine, name="steep", reference=lambda s, _, k: torch.sigmoid(k * s), parameter=turning)
    assert not steep.rises and normalizers.get("sigmoid").rises and normalizers.get("relu").scale_free
