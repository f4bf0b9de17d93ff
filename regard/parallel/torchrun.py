"""A command started by torchrun: join the process group, and find this process's GPU.

torchrun --nproc-per-node 4 -m regard examine MODEL
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def join_group(timeout: float) -> bool | None:
    """Join a gloo group and return True in a process of torchrun; return None in any other process."""
    if not dist.is_available() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return True


def is_first_rank() -> bool:
    """True on rank 0, which prints for all, and in a process without a group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def local_device(name: str) -> str:
    """Return this process's own GPU for "cuda", and any other name unchanged."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and "LOCAL_RANK" in os.environ else name
