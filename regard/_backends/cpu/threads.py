"""Runs a function over ranges of rows on the threads that torch itself would use.

Ranges are taken from one counter, so a slow core never holds up the rest; kernels release the interpreter lock. The
threads are those of torch's OpenMP team wherever that can be found: they are awake when torch has just used them, and
two teams do not compete for the same cores. Elsewhere, and after a fork, which an OpenMP team does not survive, the
threads of `tasks` are used. numba's threading layers are not: one cannot be called from two threads, the other not
after a fork.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from regard._backends.cpu.tasks import run_tasks

SMALL = 32_768  # units of work below which waking a thread costs more than it saves
RANGES = 4  # per thread

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_here = threading.local()
_is_forked = False


def run_row_ranges(work: Callable[[int, int], None], rows: int, cost: float = 1.0) -> None:
    """Calls work(first, last) on ranges that cover range(rows), several at a time; returns when all are done.

    cost: roughly how many entries one row touches; small problems run on the calling thread alone.
    """
    if rows * cost < SMALL:
        if rows > 0:
            work(0, rows)
        return
    threads = 1 if getattr(_here, "is_busy", False) else min(torch.get_num_threads(), rows)
    if threads <= 1:
        work(0, rows)
        return
    size = -(-rows // (threads * RANGES))
    counter = itertools.count()  # next() is atomic

    def run_ranges() -> None:
        _here.is_busy = True  # a call made from inside runs on its own thread
        try:
            while (first := next(counter) * size) < rows:
                work(first, min(first + size, rows))
        finally:
            _here.is_busy = False

    parallel = None if _is_forked else _find_openmp()
    if parallel is None:
        run_tasks(range(threads), lambda _thread, _own: run_ranges())
    else:
        _run_on_team(parallel, run_ranges, threads)


def _run_on_team(parallel: Callable, run_ranges: Callable[[], None], threads: int) -> None:
    failures: list[BaseException] = []
    returned: list[int] = []  # the threads that came to the end

    def body(_: int | None) -> None:
        try:  # ctypes prints and drops an exception that a signal raises before this line: the end is not reached then
            run_ranges()
            returned.append(threading.get_ident())
        except BaseException as failure:  # nothing may unwind through OpenMP; raised again below
            failures.append(failure)

    parallel(_Body(body), None, threads, 0)
    if failures:
        raise failures[0]
    if threading.get_ident() not in returned:  # signals reach the calling thread alone
        raise KeyboardInterrupt


@functools.cache
def _find_openmp() -> Callable | None:
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


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
