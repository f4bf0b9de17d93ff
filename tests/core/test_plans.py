"""Plans of calls seen before: the numbers of a first call, to the bit, and none of another call's options."""

import gc
import weakref

import pytest
import torch

import regard
from regard._core import plans
from regard._core.rows import execute

ATTENTION_OPTIONS = [
    {},
    dict(is_causal=True),
    dict(window=(2, 1)),
    dict(scale=0.7),
    dict(softcap=2.0),
    dict(temperature=0.5),
    dict(backend="cpu"),
]
ROW_OPTIONS = [{}, dict(temperature=0.5), dict(temperature=2), dict(dim=0), dict(dim=1)]


def qkv(dtype=torch.float32, heads=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, heads, 7, 16), (2, 2, 9, 16), (2, 2, 9, 5)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flat(result):
    """The tensors of what `attention` returned."""
    return [result[0], *result[1].values()] if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("stats", [False, True], ids=["plain", "statistics"])
@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_each_option_has_its_own_plan(normalizer, stats):
    inputs = [qkv(), [x.mT.contiguous().mT for x in qkv()], qkv(torch.bfloat16), qkv(heads=2)]
    calls = [
        (given, dict(normalizer=normalizer, return_stats=stats, enable_gqa=True, **options))
        for given in inputs
        for options in ATTENTION_OPTIONS
    ]
    expected = []
    for given, options in calls:
        plans.plans.clear()
        expected.append(regard.attention(*given, **options))
    for _ in range(2):  # makes the plans, then takes them
        for (given, options), first in zip(calls, expected, strict=True):
            for ours, theirs in zip(flat(regard.attention(*given, **options)), flat(first), strict=True):
                assert torch.equal(ours, theirs) and ours.stride() == theirs.stride(), options


@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_each_kind_of_rows_has_its_own_plan(normalizer):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    inputs = [x, x.T, x.T.contiguous().T, x[::2], x.double(), x.bfloat16(), x.reshape(2, 3, 10), x[:, :1]]
    calls = [(given, options) for given in inputs for options in ROW_OPTIONS]
    expected = [
        regard.normalize(given, normalizer, backend="cpu", **options) for given, options in calls
    ]  # has no plan
    execute.plans.clear()
    for _ in range(2):
        for (given, options), first in zip(calls, expected, strict=True):
            found = regard.normalize(given, normalizer, **options)
            assert torch.equal(found, first) and found.stride() == first.stride(), (given.shape, options)
    assert execute.plans


def test_a_plan_serves_tensors_that_want_no_gradient_now():
    q, k, v = qkv(heads=2)
    first = regard.attention(q, k, v, return_stats=True)
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        out, stats = regard.attention(leaf, k, v, return_stats=True)
        weights = [regard.softmax(leaf) for _ in range(2)]
    assert torch.equal(out, first[0]) and torch.equal(stats.entropy, first[1].entropy)
    assert not out._is_view() and not out.requires_grad and not weights[1].requires_grad
    assert torch.equal(weights[1], regard.softmax(q))
    assert regard.attention(leaf, k, v, return_stats=True)[0].requires_grad and regard.softmax(leaf).requires_grad


def test_autocast_does_not_round_inside_a_plan():
    given = qkv(torch.bfloat16, heads=2)
    options = dict(normalizer="entmax15", return_stats=True)
    expected = [regard.attention(*given, **options) for _ in range(2)][1]
    with torch.autocast("cpu", torch.bfloat16):
        found = [regard.attention(*given, **options) for _ in range(2)]
    for result in found:
        assert all(map(torch.equal, flat(result), flat(expected)))


def test_a_plan_keeps_no_tensor_alive():
    plans.plans.clear(), execute.plans.clear()
    given = qkv(heads=2)
    for _ in range(2):
        regard.attention(*given, return_stats=True), regard.softmax(given[0])
    assert len(plans.plans) == len(execute.plans) == 1
    known = [weakref.ref(x) for x in given]
    del given
    gc.collect()
    assert [x() for x in known] == [None] * 3


@pytest.mark.parametrize("learns", [False, True], ids=["no gradient", "gradient"])
def test_a_first_call_computes_the_statistics_that_later_ones_do(monkeypatch, learns):
    """Those that gradients are computed from are added only where there is a gradient."""
    from regard._backends.cpu.attention import launch

    asked = []
    for name in ("attend", "forward"):
        kept = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda p, kept=kept: asked.append(p.stats) or kept(p))
    plans.plans.clear()
    q, k, v = qkv()
    for _ in range(2):
        regard.attention(q.requires_grad_(learns), k, v, return_stats=("entropy", "max_logit"), enable_gqa=True)
    assert len(asked) == 2 and asked[0] == asked[1] and (len(asked[0]) == 2) is not learns
