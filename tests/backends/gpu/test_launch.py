"""Launches whose key is known go to the compiled kernel at once, and only those."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")
from attention_data import make

import regard
from regard import _facts as facts
from regard import normalizers
from regard._backends.gpu import launcher
from regard._backends.gpu.attention import config, limits
from regard._backends.gpu.attention import launch as attention
from regard._call.problem import Forward, Gradients, Problem, Upstream


class Kernel:
    """Stands for Triton's: a first launch looks at its arguments, and returns what it compiled for them."""

    def __init__(self):
        self.looked, self.direct = [], []

    def __getitem__(self, grid):
        def look(*arguments, **options):
            self.looked.append((grid, arguments, options))
            return self.compiled()

        return look

    def compiled(self):
        kernel = self

        class Compiled:
            def __getitem__(self, grid):
                return lambda *arguments: kernel.direct.append((grid, arguments))

        return Compiled()


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", {})
    return Kernel()


def test_the_second_launch_of_a_key_is_direct(kernel):
    x = torch.zeros(3)
    launcher.launch("kind", kernel, 7, (x, 32), (5,), num_warps=4)
    launcher.launch("kind", kernel, 9, (x, 48), (5,), num_warps=4)
    assert kernel.looked == [((7,), (x, 32, 5), dict(num_warps=4))]
    assert kernel.direct == [((9, 1, 1), (x, 48, 5))]


@pytest.mark.parametrize(
    "other",
    [
        dict(key="another"),
        dict(arguments=(None, 32)),
        dict(arguments=((0, 1), 32)),
        dict(arguments=(0, 33)),
        dict(arguments=(0, 1)),
        dict(constants=(6,)),
        dict(num_warps=8),
    ],
)
def test_what_triton_specialises_on_is_part_of_the_key(kernel, other):
    call = dict(key="key", kernel=kernel, programs=7, arguments=(0, 32), constants=(5,), num_warps=4)
    launcher.launch(**call)
    launcher.launch(**call | other)
    assert len(kernel.looked) == 2 and not kernel.direct


def test_launches_without_a_key_and_a_full_memory(kernel, monkeypatch):
    for _ in range(2):
        launcher.launch(None, kernel, 7, (0,))
    assert len(kernel.looked) == 2 and not launcher._compiled
    monkeypatch.setattr(launcher, "MAX_KEYS", 2)
    for kind in "abcd":
        launcher.launch(kind, kernel, 7, (0,))
    assert len(launcher._compiled) == 2


def test_launch_keys(monkeypatch):
    plain = make(0, causal=True)
    assert launcher.launch_key(plain) is None  # no GPU, nothing is compiled
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    assert launcher.launch_key(plain) == launcher.launch_key(make(0, mask=True)) == plain.q.device


def test_arguments_are_described_by_what_triton_looks_at():
    """Lengths that grow by 16 are alike, and so are tensors of one dtype and alignment; nothing is kept alive."""
    x = torch.zeros(4, 32)
    alike = [launcher.describe((x, n, (0.5, None), (x, (32, 1)))) for n in (336, 352)]
    assert alike[0] == alike[1]
    others = (x.half(), 336, (0.5, None)), (x[0, 1:], 336, (0.5, None)), (x, 335, (0.5, None)), (x, 336, (0.5, 1))
    found = [launcher.describe((*given, (x, (32, 1)))) for given in others]
    assert len({*found, alike[0]}) == 5


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_attention_runs_on_the_device_of_its_tensors(monkeypatch, way):
    """Triton launches on the current device: a layer on another one would hand it pointers of that."""
    entered = []

    class Entered(contextlib.AbstractContextManager):
        def __init__(self, device):
            entered.append(device)

        def __exit__(self, *failure):
            entered.append(None)

    def computed(problem, *others):
        assert entered == [problem.q.device]
        return Forward(*[problem.q] * 4) if way == "forward" else Gradients(*[problem.q] * 3)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(attention, "_has_tape", lambda problem: False)
    monkeypatch.setattr(attention, f"_{way}", computed)
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 8, device="cuda:1")
        problem = dataclasses.replace(make(0, b=1, h=1, g=1, m=4, n=4), q=q, k=q, v=q)
        getattr(attention, way)(problem, *([None, Upstream(q)] if way == "backward" else []))
    assert entered == [torch.device("cuda:1"), None]


@pytest.mark.parametrize(("memory", "capability"), [(232448, (9, 0)), (101376, (8, 9))], ids=["H200", "L4"])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_blocks_fit_into_shared_memory(monkeypatch, memory, capability, width):
    """Tiles of k and v for every stage, one of them in use before Hopper, and a block of q."""
    device = torch.device("cuda", 90 + capability[0])  # what is known of a device is remembered
    properties = SimpleNamespace(shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(limits, "is_bulk_readable", lambda x: True)  # a fake tensor has no address
    with FakeTensorMode():
        q = torch.empty(1, 1, 4096, width, device=device, dtype=torch.bfloat16)
        for name in ("forward_online", "forward_threshold", "backward_dq"):
            problem = Problem(q, q, q, normalizers.get("softmax"), 1.0)
            m, n, _, how = config._choose_blocks(problem, name, limits.can_bulk_copy(q))
            stages = max(how["num_stages"] - (capability < (9, 0)), 1)
            assert 2 * width * (2 * stages * n + m) <= memory, (name, m, n, stages)


@pytest.mark.parametrize("width", [64, 128])
def test_statistics_beside_tensor_memory_take_smaller_blocks(monkeypatch, width):
    """What an H200 takes needs 238,624 bytes on an sm_100, whose limit is 232,448 (tools/compile_cards.py)."""
    monkeypatch.setattr(config, "has_large_shared_memory", lambda device: True)
    found = []
    with FakeTensorMode():
        q = torch.empty(1, 1, 4096, width, device="cuda", dtype=torch.bfloat16)
        problem = Problem(q, q, q, normalizers.get("softmax"), 1.0, stats=("entropy",))
        for has_it in (False, True):
            monkeypatch.setattr(config, "has_tensor_memory", lambda device, has_it=has_it: has_it)
            _, n, _, how = config._choose_blocks(problem, "forward_online", True)
            found.append((n, how["num_stages"]))
    assert found == [(128, 3), (64, 2)]


@pytest.mark.parametrize(("kernel", "width", "place"), [
    ("forward_decode", 64, 0), ("top_keys", 64, 0), ("top_keys", 256, 0), ("backward_dkv", 256, 1)
])  # fmt: skip
def test_kernels_that_tensor_memory_cannot_serve_do_without(monkeypatch, kernel, width, place):
    """With blocks of 64 rows they do not compile for sm_100 (tools/compile_cards.py): fewer rows leave it alone."""
    monkeypatch.setattr(config, "shared_memory", lambda device: 232448)
    monkeypatch.setattr(config, "has_large_shared_memory", lambda device: True)
    with FakeTensorMode():
        q, k = (torch.empty(1, heads, 32, width, device="cuda", dtype=torch.bfloat16) for heads in (4, 1))
        problem = Problem(q, k, k, normalizers.get("softmax"), 1.0)
        found = []
        for has_it in (False, True):
            monkeypatch.setattr(config, "has_tensor_memory", lambda device, has_it=has_it: has_it)
            found.append(config._choose_blocks(problem, kernel, True)[place])
    assert found == [64, 32]


@pytest.mark.parametrize("name", ["entmax15", "sparsemax"])
@pytest.mark.parametrize(
    ("options", "warps"), [({}, 8), (dict(causal=True), 8), (dict(right=3), 8), (dict(left=64), 4)], ids=str
)
def test_threshold_maps_of_intervals_take_the_warps_that_compile(monkeypatch, name, options, warps):
    """Triton 3.6 does not compile tiles of 128 queries by 4 warps beside an interval without a window on its left."""
    monkeypatch.setattr(config, "has_large_shared_memory", lambda device: True)
    with FakeTensorMode():
        q = torch.empty(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16)
        plain = Problem(q, q, q, normalizers.get(name), 1.0, **options)
        interval = torch.empty(3, 1, 2, 1024, device="cuda", dtype=torch.int32)
        ragged = dataclasses.replace(plain, interval=interval)
        found = [config._choose_blocks(problem, "forward_threshold", True) for problem in (plain, ragged)]
    tile = 128, 64, False
    assert found == [(*tile, dict(num_warps=number, num_stages=3)) for number in (4, warps)]


def test_a_rocm_chip_of_the_same_number_is_no_hopper(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # gfx90a
    device = torch.device("cuda", 77)
    assert not (facts.is_hopper(device) or facts.has_bulk_copies(device) or facts.supports_gluon(device))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("how", ["mapped", "exported"])
def test_statistics_have_gradients_where_tensors_do_not_say_so(how):
    """Inside vmap, and while a call without gradients is traced, `requires_grad` is False."""
    q, k, v = (torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))

    def entropy(q, k, v):
        return regard.attention(q, k, v, backend="triton", return_stats=("entropy",))[1]["entropy"]

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return entropy(q, k, v)

    run = torch.vmap(entropy) if how == "mapped" else torch.export.export(Model(), (q, k, v)).module()
    q.requires_grad_()
    (found,), (known,) = (torch.autograd.grad(each(q, k, v).sum(), q) for each in (run, entropy))
    torch.testing.assert_close(found, known)
