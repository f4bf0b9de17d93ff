"""The contract that every normaliser keeps, the ninth too: forward and gradient against float64, on every path."""

import copy
import dataclasses
import math
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from rows_data import FUSED, rows

import regard
from regard import normalizers
from regard.parallel import plan
from regard.problem import Problem
from regard.statistics import Terms, solve_frame

NAMES = normalizers.names()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plain(choice, z):
    """The family's formula in plain torch, in the precision of z: the same mathematics without our kernels."""
    if not choice.fused:
        return choice.reference(z, None, choice.theta)
    seen = z > -math.inf
    frame = solve_frame(z, seen, choice)
    terms = Terms(choice)
    u, v, _, _ = (x.masked_fill(~seen, 0.0) for x in terms(z.masked_fill(~seen, 0.0), frame))
    if choice.family != "ratio":
        return u
    total = v.sum(-1, keepdim=True) + terms.rest(frame)
    return u / total.masked_fill(total == 0, 1.0)


def bound(exact, same_precision, dtype):
    """Twice what plain torch in the same precision is off, plus the rounding of the result."""
    eps = torch.finfo(dtype).eps
    return 2.0 * (same_precision.double() - exact).abs().amax() + 8.0 * eps * exact.abs().amax() + 1e-30


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
def test_forward_is_the_reference(name, dtype, n):
    choice = normalizers.get(name)
    z = rows(n, dtype=dtype)
    exact = choice.reference(z.double(), None, choice.theta)
    same = plain(choice, z.float() if dtype != torch.float64 else z).to(dtype)
    ours = regard.normalize(z, name)
    assert ours.dtype == dtype
    assert float((ours.double() - exact).abs().max()) <= float(bound(exact, same, dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_the_references(name, dtype):
    choice = normalizers.get(name)
    z = rows(33, dtype=dtype)[[0, 1, 2, 4, 7, 8, 11]]
    dp = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

    def gradient(function, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x), x, dp.to(x.dtype))[0]

    exact = gradient(lambda x: choice.reference(x, None, choice.theta), z.double())
    same = gradient(lambda x: plain(choice, x), z.float() if dtype != torch.float64 else z).to(dtype)
    ours = gradient(lambda x: regard.normalize(x, name), z)
    from_rounded = 8 * torch.finfo(dtype).eps * dp.double().abs().amax() * max(1.0, float(exact.abs().amax()))
    assert float((ours.double() - exact).abs().max()) <= float(bound(exact, same, dtype) + from_rounded)


@pytest.mark.parametrize("name", NAMES)
def test_what_rows_sum_to(name):
    choice = normalizers.get(name)
    total = regard.normalize(rows(50), name).sum(-1)
    if choice.sums_to == "1":
        assert torch.allclose(total, torch.ones_like(total), atol=1e-12)
    elif name in ("softmax1", "softpick"):
        assert ((total >= 0) & (total <= 1 + 1e-12)).all()
        assert (total < 1 - 1e-6).any()
    elif name == "relu":
        has_positive = (rows(50) > 0).any(-1)
        assert torch.allclose(total, has_positive.double(), atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_scores_weigh_nothing(name):
    z = torch.randn(5, 9, dtype=torch.float64)
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[2] = False
    garbage = z.masked_fill(~mask, math.nan).requires_grad_()
    masked = regard.normalize(garbage, name, mask=mask)
    infinite = regard.normalize(z.masked_fill(~mask, -math.inf), name)
    assert torch.equal(masked, infinite)
    assert (masked[~mask] == 0).all() and (masked[2] == 0).all()
    grad = torch.autograd.grad(masked, garbage, torch.randn_like(masked))[0]
    assert (grad[~mask] == 0).all() and (grad[2] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_poisoned_row_is_nan_and_alone(name, bad):
    z = torch.randn(4, 6)
    clean = regard.normalize(z, name)
    z[2, 3] = bad
    p = regard.normalize(z, name)
    assert p[2].isnan().all()
    assert torch.equal(p[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("name", NAMES)
def test_ties_are_equal_to_the_bit(name):
    z = torch.randn(3, 40).round(decimals=0)
    p = regard.normalize(z, name)
    for row, weights in zip(z, p, strict=True):
        for value in row.unique():
            assert weights[row == value].unique().numel() == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 5), (1, 1)])
def test_empty_rows(name, shape):
    z = torch.zeros(shape, requires_grad=True)
    p = regard.normalize(z, name)
    assert p.shape == shape
    p.sum().backward()
    assert z.grad.shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_any_dim_and_any_strides(name):
    z = torch.randn(3, 4, 5, dtype=torch.float64)
    for dim in (0, 1, 2, -2):
        moved = regard.normalize(z.movedim(dim, -1).contiguous(), name).movedim(-1, dim)
        assert torch.equal(regard.normalize(z, name, dim=dim), moved)
    strided = torch.randn(6, 20, dtype=torch.float64)[::2, ::3]
    assert torch.equal(regard.normalize(strided, name), regard.normalize(strided.contiguous(), name))
    flipped = torch.randn(5, 4, dtype=torch.float64).T
    assert torch.equal(regard.normalize(flipped, name), regard.normalize(flipped.contiguous(), name))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_their_gradients(name):
    generator = torch.Generator().manual_seed(5)
    z = (2.0 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    t = torch.tensor([[0.7], [1.0], [1.9]], dtype=torch.float64, requires_grad=True)

    def function(z, t):
        return regard.normalize(z, name, temperature=t)

    assert torch.autograd.gradcheck(function, (z, t))
    assert torch.autograd.gradgradcheck(function, (z, t))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_jacobian_and_vjp_are_the_derivative(name, temperature):
    choice = normalizers.get(name)
    z = rows(8)[[0, 1, 3, 7, 8]]
    exact = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda s: choice.reference(s / temperature, None, choice.theta), row)
            for row in z
        ]
    )
    ours = regard.jacobian(z, name, temperature)
    assert torch.allclose(ours, exact, atol=1e-9)
    g = torch.randn(z.shape, dtype=torch.float64)
    assert torch.allclose(regard.vjp(z, g, name, temperature), torch.einsum("rij,ri->rj", exact, g), atol=1e-9)


@pytest.mark.parametrize("name", FUSED)
def test_torch_citizen(name):
    z = torch.randn(4, 9, requires_grad=True)
    spec = normalizers.get(name).spec
    torch.library.opcheck(torch.ops.regard.rows.default, (z, None, None, spec, 1.0, "cpu"))
    mask = torch.rand(4, 9) > 0.3
    torch.library.opcheck(torch.ops.regard.rows.default, (z, mask, None, spec, 0.5, "cpu"))
    compiled = torch.compile(lambda z: regard.normalize(z, name, temperature=0.8), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(z), regard.normalize(z, name, temperature=0.8))
    compiled(z).pow(2).sum().backward()
    ours, z.grad = z.grad, None
    regard.normalize(z, name, temperature=0.8).pow(2).sum().backward()
    assert torch.equal(ours, z.grad)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    z = torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.equal(torch.func.vmap(lambda x: regard.normalize(x, name))(z), regard.normalize(z, name))


NINTH = (Path(__file__).parent / "squares.py").read_text()


def test_a_ninth_normaliser_is_one_file(tmp_path):
    """Rows, reference, attention, listing and these tests find it, and that of CONTRIBUTING.md, with no other edit."""
    (tmp_path / "squares.py").write_text(NINTH)
    guide = Path(__file__).parents[1] / "CONTRIBUTING.md"
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
        chosen = "(squares or quartic) and not (dtype2 or dtype3)"
        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", chosen]
        sys.exit(pytest.main([sys.argv[1], *options]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), os.path.abspath(__file__)]
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
    with pytest.raises(ValueError, match="has no fused 'mine"):
        regard.attention(q, k, v, normalizer="mine(a=1.8)", backend="cpu")
    assert normalizers.get("entmax(alpha=2)").fused and not normalizers.get("entmax(alpha=2.5)").fused
    assert normalizers.get("entmax(alpha=1)").simplest.spec == "softmax"


@pytest.mark.parametrize("a", [1.0, 1.0005, 1.004, 1.05, 1.5, 3.0, 8.0])
def test_a_parameter_under_another_name_has_all_the_care_of_entmax(a, monkeypatch):
    """Near α = 1, beyond 2 and in parts: nothing outside a normaliser's file asks for it by name."""
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
    if a in (1.0005, 1.004, 8.0):
        with pytest.raises(ValueError, match=r"mine.*: a must lie in \[1.005, 4.0\] where rows are in parts"):
            plan.choose(Problem(q, k, v, normalizers.get(mine), 1.0), None)


def test_the_bounds_of_a_parameter_are_inside():
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(8))
    for alpha, backend in ((1.0049, "reference"), (1.005, "cpu"), (2.0, "cpu"), (2.0001, "reference")):
        assert regard.attention_path(q, k, v, normalizer=f"entmax(alpha={alpha})").backend == backend
    for alpha in (1.005, 4.0):
        plan.choose(Problem(q, k, v, normalizers.get(f"entmax(alpha={alpha})"), 1.0), None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (dict(series=None), "series ≠ reference"),
        (dict(parameter=normalizers.Parameter("a", 1.5, low=1.0)), "fused_low and fused_high, 1.0 is too far"),
        (dict(series=lambda s, visible, alpha: torch.sigmoid(s)), "series ≠ reference"),
        (dict(reference_slope=lambda p, alpha: p), "tile slopes"),
        (dict(reference_excess=lambda p, alpha: p), "reference_excess ≠"),
    ],
)
def test_a_record_checks_what_stands_in_for_its_tiles(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(normalizers.get("entmax").normalizer, **changes)


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
