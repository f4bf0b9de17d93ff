"""A command started by torchrun: join the others, and let rank 0 speak for all.

    torchrun --nproc-per-node 4 -m regard examine MODEL

torchrun ends all processes as soon as one is lost, before they have found out for themselves: they look then, and say
which one it was.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist

from regard.parallel.failures import RankError, Watch


def join(timeout: float) -> bool | None:
    """True in a process of torchrun, now one of a gloo group; None in a process of its own."""
    if not dist.is_available() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        signal.signal(signal.SIGTERM, _ended)
    return True


def _ended(*_) -> None:
    """Told to end: if that is because another rank is lost, say so."""
    for watch in Watch.current():
        lost = watch.blame(RuntimeError("ended by SIGTERM"), 0.0)
        if isinstance(lost, RankError):
            print(f"regard: {lost}", file=sys.stderr, flush=True)
            raise SystemExit(1)
    raise SystemExit(128 + signal.SIGTERM)


def first() -> bool:
    """Is this the process that speaks?"""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def device(name: str) -> str:
    """This process's own GPU where "cuda" was asked for."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and "LOCAL_RANK" in os.environ else name
