"""Every resident row kernel compiles for Hopper, without a GPU: the interpreter cannot run Gluon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard

pytest.importorskip("triton")

COMPILE = """
import contextlib
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard import normalizers
from regard._backends.gpu.rows import launch

hopper = dict(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
              get_current_stream=lambda device=None: 0, is_active=lambda: True)
driver.set_active(SimpleNamespace(**hopper))
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_device = lambda: 0
launch.SMALL = 0  # no tapes: nothing runs
add_stages, run = CUDABackend.add_stages, JITFunction.run

def stop_at_ptx(self, stages, *arguments):
    add_stages(self, stages, *arguments)
    stages["cubin"] = lambda source, metadata: b""

def compile_only(self, *arguments, grid, warmup, **options):
    kernel = run(self, *arguments, grid=grid, warmup=True, **options)
    print(self.fn.__name__, "cp.async" in kernel.asm["ptx"])

CUDABackend.add_stages, JITFunction.run = stop_at_ptx, compile_only

class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)

for name, dtype, columns in [
    ("softmax", torch.float32, 20000), ("softmax1", torch.float32, 65536), ("softpick", torch.float32, 65536),
    ("relu", torch.bfloat16, 65536), ("entmax15", torch.bfloat16, 16384), ("sparsemax", torch.float32, 65536),
]:
    choice = normalizers.get(name)
    s, dp = (torch.empty(200, columns, dtype=dtype).as_subclass(OnGpu) for _ in range(2))
    p, state = launch.forward(s, choice, scale=0.5)
    if dtype == torch.bfloat16:
        launch.backward(dp, p if choice.slope_of_weight is not None else s, state, choice, scale=0.5)
"""


def test_resident_kernels_compile(tmp_path):
    (tmp_path / "compile.py").write_text(COMPILE)
    root = str(Path(regard.__file__).parents[1])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(tmp_path / "compile.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [
        "forward_ring True", "forward_resident_ratio True", "forward_resident_ratio True", "forward_ring True",
        "backward_resident True", "forward_resident_threshold True", "backward_resident True",
        "forward_resident_threshold True",
    ]  # fmt: skip
