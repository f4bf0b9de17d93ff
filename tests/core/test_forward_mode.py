"""Attention under torch.func.jvp, forward_ad and torch.func.grad: fused, of any order, and without an N × N tensor."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from rows_data import FUSED

import regard
from regard import reference
from regard._core.derivatives import blocked

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
NAMES = [*FUSED, "entmax(alpha=1.3)"]
forward = torch.autograd.forward_ad


def draw(*shape, count=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count))


def pair(**options):
    """(ours, exact): the same call, fused and by the reference."""

    def exact(*given):
        return reference.attention(*given, **options)[0]

    return lambda *given: regard.attention(*given, **options), exact


def assert_alike(transform, **options):
    ours, exact = (transform(attend) for attend in pair(**options))
    torch.testing.assert_close(ours, exact)


@pytest.fixture
def without_reference(monkeypatch):
    """Every call of the reference fails."""

    def refuse(*given, **options):
        raise AssertionError("the reference was called")

    monkeypatch.setattr(reference, "attention", refuse)


@pytest.mark.parametrize("name", NAMES)
def test_tangents(name):
    at, along = draw(2, 2, 7, 4), draw(2, 2, 7, 4, seed=1)
    for options in ({}, dict(is_causal=True, softcap=3.0)):
        assert_alike(lambda attend: torch.func.jvp(attend, at, along), normalizer=name, **options)


SOME = {
    "window": dict(window=(3, 1)),
    "lengths": dict(key_lengths=torch.tensor([4, 0])),
    "temperature": dict(temperature=torch.tensor([0.5, 2.0], dtype=torch.float64).reshape(2, 1, 1)),
    "sink": dict(sink=torch.tensor([0.5, -1.0], dtype=torch.float64)),
    "mask": dict(attn_mask=torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) > 0.4),
    "documents": dict(attn_mask=regard.Mask.documents(ids=torch.tensor([0, 0, 0, 1, 1, 2, 2]))),
    "scale": dict(scale=torch.tensor([0.3, -0.2], dtype=torch.float64)),
}


@pytest.mark.parametrize("options", SOME.values(), ids=SOME)
def test_options(options):
    at, along = draw(2, 2, 7, 4), draw(2, 2, 7, 4, seed=1)
    assert_alike(lambda attend: torch.func.jvp(attend, at, along), **options)


def test_groups_of_queries():
    q, dq = draw(2, 4, 5, 4, count=2)
    k, v, dk, dv = draw(2, 2, 6, 4, count=4, seed=1)
    assert_alike(lambda attend: torch.func.jvp(attend, (q, k, v), (dq, dk, dv)), enable_gqa=True)


def test_dual_numbers():
    (q, k, v), (dq, dk, dv) = draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1)
    at, along = (q, k, v), (dq, dk, dv)
    exact = torch.func.jvp(pair(normalizer="softmax1")[1], at, along)
    with forward.dual_level():
        duals = [forward.make_dual(x, t) for x, t in zip(at, along, strict=True)]
        out = forward.unpack_dual(regard.attention(*duals, normalizer="softmax1"))
    torch.testing.assert_close((out.primal, out.tangent), exact)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softpick", "entmax15"])
def test_forward_over_reverse(name):
    at, along = draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1)

    def transform(attend):
        return torch.func.jvp(torch.func.grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2)), at, along)

    assert_alike(transform, normalizer=name, is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "relu", "sparsemax"])
def test_reverse_over_forward(name):
    at, along = draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1)

    def transform(attend):
        moved = lambda *given: torch.func.jvp(attend, given[:3], given[3:])[1].sin().sum()  # noqa: E731
        return torch.func.grad(moved, tuple(range(6)))(*at, *along)

    assert_alike(transform, normalizer=name)


def test_forward_over_forward_and_reverse_over_reverse():
    (q, k, v), (t, u, _) = draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1)
    inner = lambda attend: lambda x: torch.func.jvp(lambda y: attend(y, k, y), (x,), (t,))[1]  # noqa: E731
    slope = lambda attend: torch.func.grad(lambda x: attend(x, k, v).sin().sum())  # noqa: E731
    assert_alike(lambda attend: torch.func.jvp(inner(attend), (q,), (u,)), normalizer="softmax1")
    assert_alike(lambda attend: torch.func.grad(lambda x: slope(attend)(x).sin().sum())(q), normalizer="softmax1")
    assert_alike(lambda attend: torch.func.jacrev(lambda x: attend(x, k, v)[0, 0])(q), normalizer="softmax1")


def test_a_hessian_along_a_direction_of_what_stands_beside_the_queries():
    q, k, v = draw(1, 2, 5, 4)
    heat = torch.tensor([0.5, 2.0], dtype=torch.float64).reshape(2, 1, 1)

    def transform(attend):
        slope = torch.func.grad(lambda t, x: attend(x, t).sin().sum(), (0, 1))
        return torch.func.jvp(slope, (heat, q), (torch.ones_like(heat), k))

    ours = transform(lambda x, t: regard.attention(x, k, v, temperature=t))
    exact = transform(lambda x, t: reference.attention(x, k, v, temperature=t)[0])
    torch.testing.assert_close(ours, exact)


@pytest.mark.usefixtures("without_reference")
@pytest.mark.parametrize("name", ["softmax", "softmax1", "sigmoid", "entmax15"])
def test_a_tangent_beside_an_ordinary_backward(name):
    """MeanFlow: backward goes through the output, and the tangent is part of a target that is detached."""
    x, direction, weight = draw(1, 2, 6, 4)
    grads = []
    for with_tangent in (True, False):
        w = weight.clone().requires_grad_()

        def model(x, w=w):
            return regard.attention(x * w, x + w, w, normalizer=name, is_causal=True)

        out, moved = torch.func.jvp(model, (x,), (direction,)) if with_tangent else (model(x), None)
        assert moved is None or moved.abs().sum() > 0
        grads.append(torch.autograd.grad(out.square().sum(), w)[0])
    torch.testing.assert_close(*grads)


def test_a_tangent_that_is_not_detached_has_its_gradient():
    x, direction, weight = draw(1, 2, 6, 4)
    grads = []
    for attend in pair(normalizer="softmax1"):
        w = weight.clone().requires_grad_()
        _, moved = torch.func.jvp(lambda x, w=w, attend=attend: attend(x * w, x + w, w), (x,), (direction,))
        grads.append(torch.autograd.grad(moved.square().sum(), w)[0])
    torch.testing.assert_close(*grads)


def largest_allocation(run) -> int:
    """Bytes of the largest tensor that torch allocates while `run` runs."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.usefixtures("without_reference")
@pytest.mark.parametrize("name", ["softmax", "softmax1", "entmax15"])
def test_4096_tokens_take_no_matrix(name):
    n = 4096
    at, along = draw(1, 1, n, 8, dtype=torch.float32), draw(1, 1, n, 8, dtype=torch.float32, seed=1)
    attend = lambda *x: regard.attention(*x, normalizer=name, is_causal=True)  # noqa: E731
    assert largest_allocation(lambda: torch.func.jvp(attend, at, along)) < n * n * 4 / 4


def along_a_slope(attend, at, along):
    return torch.func.jvp(torch.func.grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2)), at, along)


def test_nor_does_forward_over_reverse(monkeypatch):
    monkeypatch.setattr(blocked, "SCORES", 1 << 18)
    n = 2048
    at, along = draw(1, 1, n, 4), draw(1, 1, n, 4, seed=1)
    attend = lambda *x: regard.attention(*x, normalizer="softmax1")  # noqa: E731
    assert largest_allocation(lambda: along_a_slope(attend, at, along)) < n * n * 8 / 4


def test_blocks_are_joined(monkeypatch):
    monkeypatch.setattr(blocked, "SCORES", 1 << 8)
    at, along = draw(1, 2, 37, 4), draw(1, 2, 37, 4, seed=1)
    assert_alike(lambda attend: along_a_slope(attend, at, along), normalizer="softmax1", is_causal=True)


@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (0, 2, 3, 4)])
def test_no_queries(shape):
    at, along = draw(*shape), draw(*shape, seed=1)
    heat = torch.ones(2, 1, 1).double()
    out, moved = torch.func.jvp(regard.attention, at, along)
    assert out.shape == moved.shape == shape
    along_heat = torch.func.jvp(lambda t: regard.attention(*at, temperature=t), (heat,), (heat,))[1]
    assert along_heat.shape == shape
    assert all(x.shape == shape for x in along_a_slope(regard.attention, at, along)[1])


def test_dropout_is_the_forwards():
    at, along = draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1)

    def attend(step):
        torch.manual_seed(3)
        moved = (x + step * t for x, t in zip(at, along, strict=True))
        return regard.attention(*moved, dropout_p=0.4, normalizer="softmax1")

    out, tangent = torch.func.jvp(attend, (torch.zeros(()).double(),), (torch.ones(()).double(),))
    torch.testing.assert_close(out, attend(0.0))
    torch.testing.assert_close(tangent, (attend(1e-5) - attend(-1e-5)) / 2e-5, rtol=1e-6, atol=1e-8)


def test_the_path_says_so():
    q, k, v = draw(1, 2, 6, 4)
    paths = []

    def note(x, **options):
        paths.append(regard.attention_path(x, k, v, **options))
        return x

    torch.func.jvp(note, (q,), (k,))
    torch.func.jvp(lambda x: note(x, return_stats=True), (q,), (k,))
    torch.func.vmap(lambda x: torch.func.jvp(lambda y: note(y, normalizer="relu"), (x,), (k,)))(torch.stack([q, q]))
    assert [path.backend for path in paths] == ["cpu", "reference", "reference"]
    assert [path.reason.split()[-1] for path in paths] == ["gradients", "statistics", "vmap"]


def test_a_default_device_does_not_matter():
    at, along = draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1)
    exact = torch.func.jvp(pair(normalizer="softmax1")[1], at, along)
    with torch.device("meta"):
        ours = torch.func.jvp(pair(normalizer="softmax1")[0], at, along)
    torch.testing.assert_close(ours, exact)


def test_the_page_runs_as_it_is_written():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "forward-mode.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = [{}, {}]
    for text, found in zip(examples, names, strict=True):
        exec(compile(text, page.name, "exec"), found)
    assert names[0]["tangent"].isfinite().all()
    assert all(p.grad.isfinite().all() for p in names[1]["model"].parameters())


def test_a_call_seen_before_is_computed_by_its_plan():
    torch.manual_seed(0)
    plans = importlib.import_module("regard._core.plans")
    plans.settings.clear()
    options = dict(is_causal=True, normalizer="entmax15")
    for turn in range(3):
        x, along = (tuple(torch.randn(2, 3, 7, 5) for _ in range(3)) for _ in range(2))
        if turn == 2:  # another one is moved
            along = along[0], torch.zeros_like(along[1]), along[2]

        def attend(*given):
            return regard.attention(*given, **options)

        found = torch.func.jvp(attend, x, along)
        assert len(plans.settings) == 1
        truth = torch.func.jvp(
            lambda *given: regard.attention(*given, backend="reference", **options),
            tuple(y.double() for y in x),
            tuple(y.double() for y in along),
        )
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
        with torch.autograd.forward_ad.dual_level():
            q = torch.autograd.forward_ad.make_dual(x[0], along[0])
            dual = torch.autograd.forward_ad.unpack_dual(attend(q, *x[1:]))
        only = torch.func.jvp(lambda q: attend(q, *x[1:]), x[:1], along[:1])
        torch.testing.assert_close(dual.tangent, only[1])


def test_a_plan_is_not_taken_where_more_than_one_level_acts():
    torch.manual_seed(1)
    x, along = (tuple(torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3)) for _ in range(2))
    torch.func.jvp(regard.attention, x, along)  # kept

    def moved(q, k, v):
        return torch.func.jvp(regard.attention, (q, k, v), along)[1].square().sum()

    found = torch.func.grad(moved)(*x)
    truth = torch.func.grad(
        lambda *given: (
            torch.func.jvp(lambda *y: regard.attention(*y, backend="reference"), given, along)[1].square().sum()
        )
    )(*x)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)


def test_a_plan_drops_every_weight_as_the_first_call_does():
    x, along = draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1)
    for _ in range(2):
        found = torch.func.jvp(lambda *given: regard.attention(*given, dropout_p=1.0), x, along)
        assert not found[0].any() and not found[1].any()
