"""A command started by torchrun: join the others, and let rank 0 speak for all.

torchrun --nproc-per-node 4 -m regard examine MODEL
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def join(timeout: float) -> bool | None:
    """True in a process of torchrun, now one of a gloo group; None in a process of its own."""
    if not dist.is_available() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return True


def first() -> bool:
    """Is this the process that speaks?"""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def device(name: str) -> str:
    """This process's own GPU where "cuda" was asked for."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and "LOCAL_RANK" in os.environ else name
