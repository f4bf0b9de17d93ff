"""python -m regard.bench.memory: prints the MiB that attention needs beyond its inputs, outputs and gradients.

The peak of the process's resident memory is reset before the call and read after it, which only Linux offers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

LENGTH, DIM = 16384, 64


def measure_in_new_process() -> float:
    """Return the MiB, measured in a process without freed memory to reuse."""
    command = [sys.executable, "-m", "regard.bench.memory"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def attention(length: int) -> list[torch.Tensor]:
    """Run forward with all statistics and backward of one head; return every tensor the caller holds."""
    import regard

    q, k, v = (torch.randn(1, 1, length, DIM).requires_grad_() for _ in "qkv")
    out, stats = regard.attention(q, k, v, is_causal=True, return_stats=True)
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    return [q, k, v, *gradients, out, *stats.values()]


def resident(field: str) -> float:
    """Return VmRSS (now) or VmHWM (peak) in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    """Print the MiB of one call."""
    attention(256)  # compiles and starts the threads
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    held = attention(LENGTH)
    most = resident("VmHWM") - before
    print(most - sum(x.numel() * x.element_size() for x in held) / 2**20)


if __name__ == "__main__":
    main()
