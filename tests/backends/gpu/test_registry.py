"""The table of attention kernels: which kernel a call takes, why others were passed over, and its page in the docs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

from regard import _facts, normalizers
from regard._backends.gpu.attention import limits, registry
from regard._backends.gpu.attention.backward import cudnn, dkv, stored_ds
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.hopper import launch as hopper
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._call.problem import Forward, Gradients, Problem
from regard._core import dispatch

LEAST = sparse.LEAST_KEYS["forward"]
STATISTICS = "statistics of sigmoid (softmax and softmax1 only)"
OVERFLOW = "normaliser relu in float16, which may overflow"


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    """An H200, whose fake tensors lie at address 0."""
    _facts.clear()
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(shared_memory_per_block_optin=232448, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(limits, "is_bulk_readable", lambda x: True)
    with FakeTensorMode():
        yield
    _facts.clear()


def call_of(name="softmax", m=4096, n=4096, d=128, e=None, dtype=torch.bfloat16, **options) -> Problem:
    q, k = (torch.empty(1, 16, size, d, dtype=dtype, device="cuda:0") for size in (m, n))
    v = torch.empty(1, 16, n, e or d, dtype=dtype, device="cuda:0")
    return Problem(q, k, v, normalizers.get(name), **dict(scale=0.1) | options)


def backward_of(problem: Problem, temperature=False, statistics=False) -> BackwardCall:
    row = torch.empty(problem.q.shape[:-1], device="cuda:0")
    grads = Gradients(problem.q, problem.k, problem.v, temperature=row if temperature else None)
    forward = Forward(problem.q, row, row, row.unsqueeze(0))
    flags = dict(STATS_GRAD=statistics, TEMPERATURE_GRAD=temperature, Z_IN_SHIFT=False)
    return BackwardCall(problem, forward, problem.q, State(row, None, row, None, None, None), grads, flags)


@pytest.mark.parametrize(
    ("call", "kernel", "passed"),
    [
        (dict(m=1), "decode", {}),
        (dict(), "hopper", {"decode": "4096 queries (32 at most)"}),
        (dict(m=1, n=100), "online", {"decode": "100 keys (2048 at least)", "hopper": "1 queries (64 at least)"}),
        (dict(d=80), "hopper", {}),
        (dict(d=192, e=128), "hopper", {}),
        (dict(softcap=30.0), "hopper", {}),
        (dict(left=64, causal=True), "hopper", {}),
        (dict(d=60), "online", {"hopper": "head widths 60 and 60 (multiples of 8 up to 256 only)"}),
        (dict(e=256), "online", {"hopper": "values of width 256, wider than keys of 128"}),
        (dict(left=64), "hopper", {}),
        (dict(dropout_p=0.1), "online", {"hopper": "dropout"}),
        (dict(scale=-1.0), "online", {"hopper": "a scale that is not positive"}),
        (dict(dtype=torch.float32), "online", {"hopper": "float32 (bfloat16 and float16 only)"}),
        (dict(name="sigmoid"), "hopper", {}),
        (dict(name="sigmoid", stats=("entropy",)), "online", {"hopper": STATISTICS}),
        (dict(name="relu", dtype=torch.float16), "online", {"hopper": OVERFLOW}),
        (dict(name="entmax15"), "sparse threshold", {}),
        (dict(name="entmax15", d=80, softcap=30.0), "sparse threshold", {}),
        (dict(name="entmax15", n=200), "threshold", {"sparse threshold": f"200 visible keys ({LEAST} at least)"}),
        (dict(name="entmax15", m=1), "threshold", {"sparse threshold": "1 queries (128 at least)"}),
    ],
)  # fmt: skip
def test_the_kernel_of_a_call(call, kernel, passed):
    problem = call_of(**call)
    assert registry.choose(problem).name == kernel
    reasons = dict(registry.explain(problem))
    assert passed.items() <= reasons.items() and kernel not in reasons
    assert registry.describe(problem).startswith(f"{kernel}: ")
    assert all(f"not {name}: {reason}" in registry.describe(problem) for name, reason in reasons.items())


@pytest.mark.parametrize(
    ("call", "asked", "kernel"),
    [
        (dict(), dict(), "cudnn"),
        (dict(name="softmax1"), dict(), "stored ds"),
        (dict(), dict(statistics=True), "stored ds"),
        (dict(name="softmax1"), dict(temperature=True), "two sweeps"),
        (dict(name="softmax1", d=64), dict(), "two sweeps"),
        (dict(name="softmax1", m=1000), dict(), "two sweeps"),
        (dict(left=64), dict(), "stored ds"),
        (dict(left=64, causal=True), dict(), "stored ds"),
        (dict(left=64), dict(statistics=True), "two sweeps"),
        (dict(left=64, name="sigmoid"), dict(), "two sweeps"),
        (dict(left=64, d=96), dict(), "two sweeps"),
        (dict(softcap=30.0), dict(), "stored ds"),
        (dict(name="entmax15", n=16384), dict(), "sparse"),
        (dict(name="entmax15", n=16384), dict(temperature=True), "two sweeps"),
        (dict(name="entmax15", n=16384), dict(statistics=True), "two sweeps"),
        (dict(name="entmax15"), dict(), "two sweeps"),
        (dict(name="entmax15", d=192), dict(), "sparse"),
        (dict(name="entmax15", n=16384, softcap=30.0), dict(), "two sweeps"),
    ],
)
def test_the_backward_kernel_of_a_call(call, asked, kernel, monkeypatch):
    monkeypatch.setattr(cudnn, "_is_allowed_by_torch", lambda problem: True)
    assert registry.choose_backward(backward_of(call_of(**call), **asked)).name == kernel


REFUSED = {
    "row_bias": "a bias per query",
}


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_an_option_that_a_kernel_does_not_know_is_refused_by_name(name, reason, monkeypatch):
    """A kernel that ignored an interval or a bias would give wrong numbers without a word."""
    monkeypatch.setattr(cudnn, "_is_allowed_by_torch", lambda problem: True)
    plain = call_of(n=16384)
    shapes = dict(row_bias=(1, 16, 4096))
    problem = call_of(n=16384, **{name: torch.empty(shapes[name], device="cuda:0")})
    sparse_problem = replace(problem, choice=normalizers.get("entmax15"))
    backward = backward_of(problem)
    rows = backward.rows
    assert hopper.supports(plain) is None and cudnn.supports(backward_of(plain)) is None
    assert hopper.supports(problem) == sparse.supports(sparse_problem, "forward") == reason
    assert stored_ds.supports(backward) == reason and sparse.supports(sparse_problem, "backward") == reason
    assert dkv.supports_hopper(problem, problem.q, rows, problem.k, problem.v) == reason
    assert cudnn.supports(backward) == "options other than causal order and scale"


def test_an_interval_takes_hopper_and_nothing_that_would_ignore_it(monkeypatch):
    monkeypatch.setattr(cudnn, "_is_allowed_by_torch", lambda problem: True)
    interval = torch.empty(3, 1, 1, 4096, dtype=torch.int32, device="cuda:0").expand(3, 1, 16, 4096)
    problem = call_of(n=16384, interval=interval)
    assert registry.choose(problem).name == "hopper"
    assert cudnn.supports(backward_of(problem)) == "options other than causal order and scale"
    longer = call_of(n=32768, interval=interval)
    assert "fewer than 8 heads at a time" in stored_ds.supports(backward_of(longer))
    assert stored_ds.supports(backward_of(replace(longer, left=1024, right=0))) is None  # a band is enough
    assert stored_ds.supports(backward_of(call_of(interval=interval))) is None
    sparse_problem = replace(problem, choice=normalizers.get("entmax15"))
    assert sparse.supports(sparse_problem, "forward") is None
    assert sparse.supports(sparse_problem, "backward") == "an interval of keys per query"


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ((1, 16, 1, 4096), dict(), None),
        ((1, 1, 1, 4096), dict(stats=("entropy",)), None),
        ((1, 16, 1, 4096), dict(dtype=torch.float16), "a bias per key (bfloat16 only)"),
        ((1, 16, 4096, 4096), dict(), "a bias"),
        ((1, 16, 4096, 1), dict(), "a bias"),
        ((1, 16, 1, 4096), dict(softcap=30.0), "a bias (softmax and softmax1 without a soft cap only)"),
        ((1, 16, 1, 4096), dict(name="sigmoid"), "a bias (softmax and softmax1 without"),
    ],
)
def test_a_bias_per_key_takes_hopper(sizes, options, reason):
    bias = torch.empty(sizes, device="cuda:0").expand(1, 16, 4096, 4096)
    found = hopper.supports(call_of(bias=bias, **options))
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        (dict(), "hopper", "stored ds"),
        (dict(stats=("entropy",)), "hopper", "stored ds"),
        (dict(name="sigmoid"), "hopper", None),
        (dict(d=64), "hopper", None),
        (dict(name="entmax15"), "sparse threshold", None),
        (dict(name="entmax15", n=16384), "sparse threshold", "sparse"),
        (dict(name="entmax15", n=LEAST - 1), None, None),
        (dict(dtype=torch.float32), None, None),
        (dict(dropout_p=0.1), None, None),
        (dict(m=512, n=511), None, None),
        (dict(m=16, n=2**20), "decode", None),
    ],
)
def test_a_mask_that_may_be_intervals(options, forward, backward, monkeypatch):
    """The kernels that take it then, beside that of masks."""
    monkeypatch.setattr(cudnn, "_is_allowed_by_torch", lambda problem: True)
    plain = call_of(**options)
    shape = 1, 16, plain.q.shape[2], plain.k.shape[2]
    problem = replace(plain, mask=torch.empty(1, 1, 1, shape[-1], dtype=torch.bool, device="cuda:0").expand(shape))
    bare = registry.choose_bare(problem)
    assert (bare is None) == (forward is None)
    of_masks = "threshold" if problem.choice.family == "threshold" else "online"
    assert registry.choose(problem).name == of_masks and f"{of_masks}: " in registry.describe(problem)
    if bare is not None:
        assert bare.mask is None and registry.choose(bare).name == forward
        assert registry.describe(problem).startswith(f"{forward}: ") and "if the mask " in registry.describe(problem)
    call = backward_of(problem)
    bare = registry.choose_bare_backward(call)
    assert (None if bare is None else registry.choose_backward(call._replace(problem=bare)).name) == backward
    assert registry.choose_backward(call).name == "two sweeps"


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        (dict(), "triton"),
        (dict(dtype=torch.float16), "triton"),
        (dict(dtype=torch.float32), "torch"),
        (dict(m=2000, n=2000), "torch"),
        (dict(d=60), "torch"),
        (dict(dropout_p=0.1), "torch"),
    ],
)
def test_plain_softmax_beside_a_mask(options, backend):
    plain = call_of(**options)
    shape = 1, 16, plain.q.shape[2], plain.k.shape[2]
    mask = torch.empty(shape, dtype=torch.bool, device="cuda:0")
    assert dispatch.choose(replace(plain, mask=mask), None, None).backend == backend
    bias = torch.empty(shape, dtype=plain.q.dtype, device="cuda:0")
    assert dispatch.choose(replace(plain, bias=bias), None, None).backend == "torch"


def test_a_relative_bias_takes_hopper_and_nothing_that_would_ignore_it(monkeypatch):
    monkeypatch.setattr(cudnn, "_is_allowed_by_torch", lambda problem: True)
    given = dict(relative=torch.empty(16, 8191, device="cuda:0"))
    problem = call_of(**given, stats=("entropy",), dtype=torch.float16)
    assert registry.choose(problem).name == "hopper"
    for width, stats, kernel in ((64, ("entropy",), "hopper"), (64, (), "online"), (72, (), "hopper")):
        assert registry.choose(call_of(**given, d=width, stats=stats)).name == kernel
    assert cudnn.supports(backward_of(problem)) == "options other than causal order and scale"
    assert stored_ds.supports(backward_of(problem)) is None
    assert stored_ds.supports(backward_of(problem, statistics=True)) == "gradients of statistics"
    key_bias = torch.empty(1, 16, 1, 4096, device="cuda:0").expand(1, 16, 4096, 4096)
    both, capped, other = call_of(**given, bias=key_bias), call_of(**given, softcap=30.0), call_of("sigmoid", **given)
    for refused in (both, capped, other):
        assert "a bias" in hopper.supports(refused)
        assert "bias" in stored_ds.supports(backward_of(refused))
    sparse_problem = call_of("entmax15", n=16384, relative=torch.empty(16, 4096 + 16383, device="cuda:0"))
    for direction in ("forward", "backward"):
        assert sparse.supports(sparse_problem, direction) == "a bias by relative position"


def test_other_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert dict(registry.explain(call_of()))["hopper"] == "no Hopper GPU with Triton 3.6 or later"


def test_the_page_is_current():
    assert registry.PAGE.read_text() == registry.render(), "run python -m regard._backends.gpu.attention.registry"
