"""Loss kernels in Triton's interpreter, on few lanes: rows whose lanes hide scores, and rows whose lanes do not."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import normalizers, reference

pytest.importorskip("triton")

from regard._backends.gpu.losses import kernels, launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, inside the interpreter
LANES = 16


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch):
    monkeypatch.setattr(launch, "LANES", LANES)
    monkeypatch.setattr(launch, "TILE", dict.fromkeys((2, 4, 8), 64))


def run(logits, target, name, ignore_index=-100):
    choice = normalizers.get(name)
    loss, state = launch.forward(logits, target, choice, ignore_index)
    upstream = torch.linspace(-1.0, 2.0, len(logits), dtype=loss.dtype)
    return loss, launch.backward(upstream, logits, target, state, choice, ignore_index), state


def check(logits, target, name):
    """Holds loss and gradient to float64."""
    loss, ds, _ = run(logits, target, name)
    wide = logits.double().requires_grad_()
    exact = reference.fenchel_young_loss(wide, target, name)
    upstream = torch.linspace(-1.0, 2.0, len(logits), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(exact, wide, upstream)
    eps = 1e-9 if logits.dtype == torch.float64 else torch.finfo(torch.float32).eps
    assert ((loss.double() - exact).abs() <= 16 * eps * (1 + exact.abs() + wide.abs().amax(-1))).all()
    weight = {torch.bfloat16: 4e-3, torch.float16: 7e-4}.get(logits.dtype, 50 * eps)
    assert ((ds.double() - gradient).abs().amax(-1) <= weight * upstream.abs()).all()


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("softmax", torch.float32), ("softmax", torch.bfloat16), ("sparsemax", torch.float32),
        ("entmax15", torch.float32), ("entmax15", torch.bfloat16), ("entmax15", torch.float64),
        ("entmax(alpha=1.3)", torch.float16),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("n", [1, 48, 100])
def test_losses_and_gradients_are_those_of_float64(name, dtype, n):
    generator = torch.Generator().manual_seed(n)
    spread = torch.tensor([[1e-2], [1.0], [5.0]])
    logits = (torch.randn(3, n, generator=generator) * spread + 2.0).to(dtype)
    target = torch.randint(n, (3,), generator=generator)
    target[1] = logits[1].argmax()
    check(logits, target, name)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_rows_go_on_with_all_scores_if_a_lane_hides_some(name, monkeypatch):
    """The largest four of a row stand in one lane: three are kept, and the fourth has weight too."""
    seen = []
    found = kernels.sum_steps
    monkeypatch.setattr(kernels, "sum_steps", lambda *given: seen.append(1) or found(*given))
    logits = torch.full((1, 100), -3.0)
    logits[0, 5:100:LANES] = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.25, 0.15])
    check(logits, torch.tensor([5]), name)
    assert seen
    seen.clear()
    spread = torch.full((1, 100), -3.0)
    spread[0, 5:11] = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.25, 0.15])
    check(spread, torch.tensor([5]), name)
    assert not seen


def test_targets_that_are_ignored_or_no_class():
    logits = torch.randn(5, 40)
    logits[1] = math.nan
    target = torch.tensor([3, 7, 40, -1, 7])
    loss, ds, _ = run(logits, target, "entmax15", ignore_index=7)
    assert loss.isnan().tolist() == [False, False, True, True, False] and loss[1] == loss[4] == 0
    assert ds.isnan().all(-1).tolist() == [False, False, True, True, False] and (ds[[1, 4]] == 0).all()


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_rows_with_infinities_and_nan(name):
    logits = torch.randn(5, 70)
    logits[0, :66] = -math.inf
    logits[1] = -math.inf
    logits[2, 3] = math.nan
    logits[3, 3] = math.inf
    logits[4, 3] = -math.inf
    target = torch.tensor([68, 3, 3, 3, 3])
    loss, ds, _ = run(logits, target, name)
    assert loss.isnan().tolist() == [False, True, True, True, False] and loss[4] == math.inf
    assert ds.isnan().all(-1).tolist() == [False, True, True, True, False]
    check(logits[:1], target[:1], name)


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_without_a_target_the_potential(name):
    logits = torch.randn(3, 50)
    loss, state = launch.forward(logits, None, normalizers.get(name))
    torch.testing.assert_close(loss, reference.fenchel_young_loss(logits, None, name).float())
    ds = launch.backward(torch.ones(3), logits, None, state, normalizers.get(name))
    torch.testing.assert_close(ds, reference.normalize(logits, name).float(), atol=1e-6, rtol=1e-5)


COMPILE = """
import contextlib
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard import normalizers
from regard._backends.gpu.losses import launch

hopper = dict(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
              get_current_stream=lambda device=None: 0, is_active=lambda: True)
driver.set_active(SimpleNamespace(**hopper))
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device: (9, 0)
launch.tensor_key = lambda *tensors: None  # nothing is launched, so nothing is remembered
add_stages, run = CUDABackend.add_stages, JITFunction.run

def stop_at_ptx(self, stages, *arguments):
    add_stages(self, stages, *arguments)
    stages["cubin"] = lambda source, metadata: b""

def compile_only(self, *arguments, grid, warmup, **options):
    kernel = run(self, *arguments, grid=grid, warmup=True, **options)
    print(self.fn.__name__, "ld.global.v4" in kernel.asm["ptx"], "max.NaN.f16x2" in kernel.asm["ptx"])

CUDABackend.add_stages, JITFunction.run = stop_at_ptx, compile_only

class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)

for name, dtype in (("softmax", torch.bfloat16), ("entmax15", torch.float32), ("sparsemax", torch.float16)):
    s, y = torch.empty(4, 131072, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    s, y = s.as_subclass(OnGpu), y.as_subclass(OnGpu)
    loss, state = launch.forward(s, y, normalizers.get(name))
    launch.backward(loss, s, y, state, normalizers.get(name))
"""


def test_kernels_compile_for_hopper_and_read_16_bytes_at_a_time(tmp_path):
    (tmp_path / "compile.py").write_text(COMPILE)
    root = str(Path(regard.__file__).parents[1])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(tmp_path / "compile.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [
        "forward_softmax True False", "backward True False", "forward_threshold True False", "backward True False",
        "forward_threshold True True", "backward True False",
    ]  # fmt: skip
