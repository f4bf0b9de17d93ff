"""The same work on several cores, each with its own single-threaded BLAS.

torch's products use all cores for one product and leave its helpers spinning when it is done, in the way of whatever
comes next. Work that has enough independent products runs them side by side instead: here the threads have torch's
thread count set to 1, which torch keeps per thread; the caller's own setting stays what it is.
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

_pool: ThreadPoolExecutor | None = None
_size = 0
_lock = threading.Lock()
_here = threading.local()


def each(items: Iterable[T], work: Callable[[T, dict], None], cores: int | None = None) -> None:
    """Call work(item, own) for every item, first ones first, on as many threads as torch uses here (at most `cores`).

    `own` is a dict of the thread's own that lasts as long as the call: a place for buffers.

    >>> from regard._backends.cpu.cores import each
    >>> done = []
    >>> each(range(100), lambda item, own: done.append(item))
    >>> sorted(done) == list(range(100))
    True
    """
    queue = deque(items)
    count = min(torch.get_num_threads(), len(queue), len(queue) if cores is None else cores)
    inference = torch.is_inference_mode_enabled()

    def worker() -> None:
        own: dict = {}
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            while True:
                try:
                    item = queue.popleft()
                except IndexError:
                    return
                work(item, own)

    if count <= 1 or getattr(_here, "alone", False):
        worker()
        return
    pool = _executor(count)
    futures = [pool.submit(worker) for _ in range(count)]
    try:
        for future in futures:
            future.result()
    finally:
        queue.clear()  # after a failure, or Ctrl-C, nobody takes up more
        wait(futures)


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size < size:
            threads = torch.get_num_threads()
            _pool, _size = ThreadPoolExecutor(size, thread_name_prefix="regard-blas", initializer=_alone), size
            started = threading.Barrier(size)
            for future in [_pool.submit(started.wait) for _ in range(size)]:
                future.result()
            torch.set_num_threads(threads)  # threads that others start later begin with this number again
        return _pool


def _alone() -> None:
    torch.set_num_threads(1)
    _here.alone = True


def _forget() -> None:
    global _pool, _size, _lock
    _pool, _size, _lock = None, 0, threading.Lock()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
