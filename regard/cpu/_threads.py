"""work(first, last) over all rows, on as many threads as torch would use.

The calling thread works too and takes pieces from the same counter as the helpers, so a slow or busy core never
holds up the rest. Kernels release the interpreter lock. numba's own threading layers are left alone: one is not
safe to call from two threads, the other not after a fork.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SMALL = 32_768  # units of work below which waking a thread costs more than it saves
PIECES = 4  # per thread

_pool: ThreadPoolExecutor | None = None
_size = 0
_lock = threading.Lock()
_here = threading.local()


def over_rows(work: Callable[[int, int], None], rows: int, cost: float = 1.0, piece: int | None = None) -> None:
    """Call work(first, last) on pieces that cover range(rows), several at a time; returns when all is done.

    cost: roughly how many entries one row touches; small problems run on the calling thread alone.
    piece: rows per piece; by default an even share, cut in four.
    """
    threads = 1 if getattr(_here, "helping", False) else min(torch.get_num_threads(), rows)
    if threads <= 1 or rows * cost < SMALL:
        if rows > 0:
            work(0, rows)
        return
    piece = piece or max(1, -(-rows // (threads * PIECES)))
    counter = itertools.count()  # next() is atomic

    def share() -> None:
        while (first := next(counter) * piece) < rows:
            work(first, min(first + piece, rows))

    pool = _executor(threads - 1)
    helpers = [pool.submit(_helping, share) for _ in range(threads - 1)]
    try:
        share()
    finally:
        waiting = [helper for helper in helpers if not helper.cancel()]  # those that started
        for helper in waiting:
            helper.exception()
    for helper in waiting:
        helper.result()


def _helping(share: Callable[[], None]) -> None:
    _here.helping = True  # a call made from inside stays on this thread
    try:
        share()
    finally:
        _here.helping = False


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size < size:
            _pool, _size = ThreadPoolExecutor(size, thread_name_prefix="regard"), size
        return _pool


def _forget() -> None:
    global _pool, _size, _lock
    _pool, _size, _lock = None, 0, threading.Lock()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
