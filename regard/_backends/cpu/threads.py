"""work(first, last) over all rows, on the threads that torch itself would use.

Pieces are taken from one counter, so a slow or busy core never holds up the rest, and kernels release the interpreter
lock. The threads are those of torch's own OpenMP team wherever that can be found: they are awake when torch has just
used them, and two teams do not fight for the same cores. Elsewhere, and after a fork, which an OpenMP team does not
survive, a pool of Python threads does the same. numba's threading layers are left alone: one is not safe to call from
two threads, the other not after a fork.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SMALL = 32_768  # units of work below which waking a thread costs more than it saves
PIECES = 4  # per thread

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_here = threading.local()
_forked = False
_pool: ThreadPoolExecutor | None = None
_size = 0
_lock = threading.Lock()


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
        _here.helping = True  # a call made from inside stays on its thread
        try:
            while (first := next(counter) * piece) < rows:
                work(first, min(first + piece, rows))
        finally:
            _here.helping = False

    parallel = None if _forked else _openmp()
    if parallel is None:
        _on_pool(share, threads)
    else:
        _on_team(parallel, share, threads)


def _on_team(parallel: Callable, share: Callable[[], None], threads: int) -> None:
    failures: list[BaseException] = []
    returned: list[int] = []  # the threads that came to the end

    def body(_: int | None) -> None:
        try:  # a signal's exception on the way in is printed and dropped by ctypes: then the end is not reached
            share()
            returned.append(threading.get_ident())
        except BaseException as failure:  # nothing may unwind through OpenMP; raised again below
            failures.append(failure)

    parallel(_Body(body), None, threads, 0)
    if failures:
        raise failures[0]
    if threading.get_ident() not in returned:  # signals reach the calling thread alone
        raise KeyboardInterrupt


def _on_pool(share: Callable[[], None], threads: int) -> None:
    pool = _executor(threads - 1)
    helpers = [pool.submit(share) for _ in range(threads - 1)]
    try:
        share()
    finally:
        waiting = [helper for helper in helpers if not helper.cancel()]  # those that started
        for helper in waiting:
            helper.exception()
    for helper in waiting:
        helper.result()


@functools.cache
def _openmp() -> Callable | None:
    """GOMP_parallel(body, data, threads, flags) of the OpenMP library that this process has loaded, if there is one."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        return None
    known = sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))
    bundled = [path for path in known if Path(torch.__file__).parent in Path(path).parents]
    known = bundled or known
    if len(known) != 1:  # none, or no way to tell which is torch's
        return None
    try:
        parallel = ctypes.CDLL(known[0]).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size < size:
            _pool, _size = ThreadPoolExecutor(size, thread_name_prefix="regard"), size
        return _pool


def _forget() -> None:
    global _forked, _pool, _size, _lock
    _forked, _pool, _size, _lock = True, None, 0, threading.Lock()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
