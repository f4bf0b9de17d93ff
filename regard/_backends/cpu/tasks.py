"""Runs independent tasks on several threads, each with a single-threaded BLAS.

torch uses all cores for one product, and its threads keep spinning for a while afterwards, in the way of other work.
Work with many independent products runs them side by side instead: the threads here have torch's thread count set to
1, which torch keeps per thread. The caller's own setting does not change.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")
SMALL = 32_768  # entries below which waking a thread costs more than it saves
RANGES = 4  # of rows, per thread

_pool: ThreadPoolExecutor | None = None
_size = 0
_lock = threading.Lock()
_here = threading.local()


def run_tasks(items: Iterable[T], work: Callable[[T, dict], None]) -> None:
    """Calls work(item, own) for every item, in order of starting, on as many threads as torch uses.

    `own` is a dict per thread for buffers; it lasts as long as the call.

    >>> from regard._backends.cpu.tasks import run_tasks
    >>> done = []
    >>> run_tasks(range(100), lambda item, own: done.append(item))
    >>> sorted(done) == list(range(100))
    True
    """
    queue = deque(items)
    count = min(torch.get_num_threads(), len(queue))
    if count <= 1 or getattr(_here, "is_worker", False):
        run_here(queue, work)
        return
    inference = torch.is_inference_mode_enabled()

    def run_queue() -> None:
        own: dict = {}
        with torch.inference_mode(inference), torch.no_grad():
            while True:
                try:
                    item = queue.popleft()
                except IndexError:
                    return
                work(item, own)

    pool = _start_pool(count)
    futures = [pool.submit(run_queue) for _ in range(count)]
    try:
        for future in futures:
            future.result()
    finally:
        queue.clear()  # after a failure or Ctrl-C no thread starts another item
        wait(futures)


def run_row_ranges(work: Callable[[int, int], None], rows: int, cost: float = 1.0) -> None:
    """Calls work(first, last) on ranges that cover range(rows), several at a time; returns when all are done.

    cost: roughly how many entries one row touches; small problems run on the calling thread alone.
    """
    count = 1 if rows * cost < SMALL else min(torch.get_num_threads(), rows)
    if count <= 1:
        if rows > 0:
            work(0, rows)
        return
    size = -(-rows // (count * RANGES))  # a slow core does not hold up the rest
    run_tasks(range(0, rows, size), lambda first, _: work(first, min(first + size, rows)))


def run_here(items: Iterable[T], work: Callable[[T, dict], None]) -> None:
    """Calls work(item, own) for every item on the calling thread, without gradients and autocast."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return run_here(items, work)
    own: dict = {}
    with torch.no_grad():
        for item in items:
            work(item, own)


def _start_pool(size: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size < size:
            threads = torch.get_num_threads()
            _pool, _size = ThreadPoolExecutor(size, thread_name_prefix="regard-blas", initializer=_start_worker), size
            started = threading.Barrier(size)
            for future in [_pool.submit(started.wait) for _ in range(size)]:
                future.result()
            torch.set_num_threads(threads)  # threads that others start later begin with this number again
        return _pool


def _start_worker() -> None:
    torch.set_num_threads(1)
    _here.is_worker = True


def _drop_pool() -> None:
    global _pool, _size, _lock
    _pool, _size, _lock = None, 0, threading.Lock()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_pool)
