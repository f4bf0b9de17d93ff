"""The same work on several cores, each with its own single-threaded BLAS.

torch's products use all cores for one product and leave its helpers spinning when it is done, in the way of whatever
comes next. Work that has enough independent products runs them side by side instead: here the threads have torch's
thread count set to 1, which torch keeps per thread; the caller's own setting stays what it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pool: ThreadPoolExecutor | None = None
_size = 0
_lock = threading.Lock()
_here = threading.local()


def each(worker: Callable[[], None], limit: int) -> None:
    """Call worker() on as many threads as torch uses here, at most `limit`; returns when all of them have.

    >>> from regard.cpu._cores import each
    >>> todo, done = list(range(100)), []
    >>> each(lambda: [done.append(todo.pop()) for _ in range(10)], limit=1)
    >>> len(done)
    10
    """
    count = 1 if getattr(_here, "alone", False) else min(torch.get_num_threads(), limit)
    inference = torch.is_inference_mode_enabled()

    def quietly():
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            worker()

    if count <= 1:
        quietly()
        return
    pool = _executor(count)
    futures = [pool.submit(quietly) for _ in range(count)]
    failures = [future.exception() for future in futures]  # waits for all of them
    for failure in failures:
        if failure is not None:
            raise failure


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
