"""`make compile`: its table has every normaliser with a kernel, and a call of it compiles for Hopper without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard import normalizers

pytest.importorskip("triton")
import kernel_calls


def test_the_table_has_every_fused_normaliser():
    calls = kernel_calls.make_calls()
    fused = {name for name in normalizers.names() if normalizers.get(name).fused}
    assert {call.normalizer.partition("(")[0] for call in calls} == fused
    assert len({str(call) for call in calls}) == len(calls)


def test_a_call_compiles(tmp_path):
    root = Path(regard.__file__).parents[1]
    tool = [sys.executable, str(root / "tools" / "compile_kernels.py")]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    words = "sigmoid plain bfloat16 d64 n1024 no-statistics forward"
    done = subprocess.run([*tool, "-k", words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kernels of 1 calls compiled, 0 calls failed" in done.stdout
