"""Calls by the thousand, from several threads and from forked workers: nothing grows, hangs or differs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

import regard

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


@needs_proc
def test_nothing_grows():
    from soak import soak

    before, after = soak(4000, names=["softmax", "entmax15"], dtypes=[torch.float32])
    assert after["memory"] - before["memory"] < 16_384  # kilobytes
    for what in ("files", "threads", "kernels", "signatures"):
        assert after[what] <= before[what], what


def test_two_threads_at_once():
    z = [torch.randn(64, 300) for _ in range(4)]
    q = torch.randn(1, 2, 64, 16)
    alone = [regard.entmax15(x) for x in z], regard.attention(q, q, q, return_stats=True)

    def both(_):
        rows = [regard.entmax15(x) for x in z]
        out, stats = regard.attention(q, q, q, return_stats=True)
        return all(map(torch.equal, rows, alone[0])) and torch.equal(out, alone[1][0]), stats["entropy"]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(both, range(20)))
    assert all(same and torch.equal(entropy, alone[1][1]["entropy"]) for same, entropy in found)


WORKERS = """
    import os, torch, regard
    from torch.utils.data import DataLoader, Dataset
    from regard import normalizers
    from regard._backends.cpu.rows import launch as rows

    class Rows(Dataset):
        def __len__(self): return 6
        def __getitem__(self, i):
            z = torch.randn(40, 1000, generator=torch.Generator().manual_seed(i))
            q = z[:, :64].reshape(1, 1, 40, 64)
            return regard.sparsemax(z), regard.attention(q, q, q, normalizer="entmax15")

    if __name__ == "__main__":
        torch.set_num_threads(2)
        here = [Rows()[i] for i in range(6)]  # the parent's threads have run before the fork
        loader = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=100)
        for (p, o), (right, out) in zip(loader, here, strict=True):
            assert torch.equal(p, right) and torch.allclose(o, out)
        s, choice = torch.randn(512, 512), normalizers.get("softmax")
        before, child = rows.forward(s, choice)[0], os.fork()
        if child == 0:
            after = rows.forward(s, choice)[0]
            os._exit(0 if (after.numpy() == before.numpy()).all() else 1)  # torch's own threads do not survive
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("same")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers(tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(textwrap.dedent(WORKERS), encoding="utf-8")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert run.stdout.strip() == "same", run.stderr[-2000:]
